// @ts-check
/** Looks at a stream's counters a few times a second while it is open and the page is seen. */
import { Poll } from "./poll.js";

const EVERY_MS = 350;
const AFTER_ERROR_MS = 2_000;

export class JournalPoll {
  #client;
  #streamId;
  #show;
  #poll;

  /**
   * @param {import("./midstream.js").Client} client
   * @param {string} streamId
   * @param {(state: Record<string, any>) => void} show
   */
  constructor(client, streamId, show) {
    this.#client = client;
    this.#streamId = streamId;
    this.#show = show;
    this.#poll = new Poll(() => this.#look(), EVERY_MS);
  }

  stop() {
    this.#poll.stop();
  }

  /** Looks once more at once, also after the end. */
  refresh() {
    this.#poll.refresh();
  }

  /** @returns {Promise<number | null>} when to look again; null: when asked */
  async #look() {
    try {
      const state = await this.#client.state(this.#streamId);
      if (!this.#poll.stopped) this.#show(state);
      return state.status === "open" ? EVERY_MS : null;
    } catch (error) {
      const { status = 0 } = /** @type {{status?: number}} */ (error);
      return [401, 403, 404].includes(status) ? null : AFTER_ERROR_MS;
    }
  }
}
