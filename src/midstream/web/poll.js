// @ts-check
/** Looks again and again while the page is seen. */

export class Poll {
  #look;
  #everyMs;
  #stopped = false;
  #wake = () => {};

  /**
   * @param {() => Promise<number | null>} look says after how many milliseconds to look again; null: when asked
   * @param {number} everyMs how often to see whether a hidden page is seen again
   */
  constructor(look, everyMs) {
    this.#look = look;
    this.#everyMs = everyMs;
    this.#run();
  }

  get stopped() {
    return this.#stopped;
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
      const delayMs = document.hidden ? this.#everyMs : await this.#look();
      await new Promise((/** @type {(value?: unknown) => void} */ resolve) => {
        this.#wake = () => resolve();
        if (delayMs !== null) setTimeout(resolve, delayMs);
      });
    }
  }
}
