// @ts-check
/** Looks at a stream's counters a few times a second while it is open and the page is seen. */

const EVERY_MS = 350;
const AFTER_ERROR_MS = 2_000;

export class JournalPoll {
  #client;
  #streamId;
  #show;
  #stopped = false;
  #wake = () => {};

  /**
   * @param {import("./midstream.js").Client} client
   * @param {string} streamId
   * @param {(state: Record<string, any>) => void} show
   */
  constructor(client, streamId, show) {
    this.#client = client;
    this.#streamId = streamId;
    this.#show = show;
    this.#run();
  }

  stop() {
    this.#stopped = true;
    this.#wake();
  }

  /** Looks once more at once, also after the end. */
  refresh() {
    this.#wake();
  }

  async #run() {
    while (!this.#stopped) {
      const delayMs = document.hidden ? EVERY_MS : await this.#look();
      await new Promise((/** @type {(value?: unknown) => void} */ resolve) => {
        this.#wake = () => resolve();
        if (delayMs !== null) setTimeout(resolve, delayMs);
      });
    }
  }

  /** @returns {Promise<number | null>} when to look again; null: when asked */
  async #look() {
    try {
      const state = await this.#client.state(this.#streamId);
      if (!this.#stopped) this.#show(state);
      return state.status === "open" ? EVERY_MS : null;
    } catch (error) {
      const { status = 0 } = /** @type {{status?: number}} */ (error);
      return [401, 403, 404].includes(status) ? null : AFTER_ERROR_MS;
    }
  }
}
