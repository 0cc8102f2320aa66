// @ts-check
/**
 * What outlives a reload, kept for this tab alone: two tabs are two readers, each with its own position.
 *
 * @typedef {object} SavedSession
 * @property {number} version
 * @property {string} prompt
 * @property {string} model
 * @property {string | null} streamId
 * @property {import("./reader.js").SavedReader[]} readers
 */

const SESSION = "midstream.session";
const KEY = "midstream.key";
const VERSION = 1;

/** @returns {SavedSession | null} */
export function loadSession() {
  try {
    const saved = JSON.parse(sessionStorage.getItem(SESSION) ?? "null");
    return saved?.version === VERSION ? saved : null;
  } catch {
    return null;
  }
}

/** @param {Omit<SavedSession, "version">} session */
export function saveSession(session) {
  try {
    sessionStorage.setItem(SESSION, JSON.stringify({ version: VERSION, ...session }));
  } catch {
    // Storage is full or forbidden: the page works, only a reload begins anew.
  }
}

export function loadKey() {
  try {
    return sessionStorage.getItem(KEY);
  } catch {
    return null;
  }
}

/** @param {string} key */
export function saveKey(key) {
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // As above; the key is asked for again.
  }
}
