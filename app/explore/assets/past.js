// What was done, so that it can be undone and done again.

const MOST = 100; // steps back

export class Past {
  constructor() {
    /** @type {{text: string, label: string}[]} */ this.back = [];
    /** @type {{text: string, label: string}[]} */ this.ahead = [];
  }

  /** Keep the state as it is before a change. @param {State} state @param {string} label what is about to be done */
  keep(state, label) {
    this.back = [...this.back, { text: JSON.stringify(state), label }].slice(-MOST);
    this.ahead = [];
  }

  /** @param {State} state @returns {{state: State, label: string} | null} */ undo(state) {
    return swap(this.back, this.ahead, state);
  }

  redo(/** @type {State} */ state) {
    return swap(this.ahead, this.back, state);
  }
}

function swap(/** @type {{text: string, label: string}[]} */ from, /** @type {{text: string, label: string}[]} */ to, /** @type {State} */ state) {
  const step = from.pop();
  if (!step) return null;
  to.push({ text: JSON.stringify(state), label: step.label });
  return { state: JSON.parse(step.text), label: step.label };
}

/** Undo and redo by keyboard, except where a field undoes its own letters. @param {() => void} undo @param {() => void} redo */
export function listen(undo, redo) {
  addEventListener("keydown", (event) => {
    const at = /** @type {HTMLElement} */ (event.target);
    if (!(event.ctrlKey || event.metaKey) || event.altKey || at.matches?.("textarea, [type=number], [type=password]")) return;
    const key = event.key.toLowerCase();
    if (key !== "z" && key !== "y") return;
    event.preventDefault();
    (key === "y" || event.shiftKey ? redo : undo)();
  });
}
