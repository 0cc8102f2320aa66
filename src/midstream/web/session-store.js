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
const TRANSPORT = "midstream.transport";
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

export const loadKey = () => load(KEY);
export const saveKey = (/** @type {string} */ key) => save(KEY, key);
export const loadTransport = () => load(TRANSPORT);
export const saveTransport = (/** @type {string} */ name) => save(TRANSPORT, name);

/** @param {string} name */
function load(name) {
  try {
    return sessionStorage.getItem(name);
  } catch {
    return null;
  }
}

/** @param {string} name @param {string} value */
function save(name, value) {
  try {
    sessionStorage.setItem(name, value);
  } catch {
    // As above; it is asked for again.
  }
}
