// What all parts share: the data, small makers of elements, and how numbers and tokens are written.
const DATA = JSON.parse(document.getElementById("data").textContent);
const STROKES = { copy: 0, eagle: 1, draft: 2 };
const WHO = { target: "the target itself", copy: "copied", eagle: "EAGLE head", draft: "draft model" };

const by = (id) => document.getElementById(id);

// An element; children are elements or text, and text stays text.
function make(tag, name, ...children) {
  const made = document.createElement(tag);
  if (name) made.className = name;
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

function button(text, act, title) {
  const made = make("button", "", text);
  made.type = "button";
  if (title) made.title = title;
  made.addEventListener("click", act);
  return made;
}

function number(value, digits) {
  if (value === null || value === undefined) return "–";
  return typeof value === "number" ? value.toFixed(digits) : value === "-inf" ? "−∞" : "∞";
}

const share = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
const counted = (n, noun) => (n === 1 ? `1 ${noun}` : `${n} ${noun}s`);

// Joiners alone, and what has no width or no ink, or directs the writing: marks, fillers, controls, tags, selectors.
const UNSEEN = /^[\u200c\u200d]+$|[\u0080-\u009f\u00ad\u061c\u115f\u1160\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\u{e0000}-\u{e0fff}]/gu;

// What a token's text looks like: characters that would be unseen, or turn the writing around, get a sign of their own.
// Joiners (U+200C, U+200D) inside of something are a part of its spelling.
function seen(piece) {
  return piece.replace(/[\u0000-\u0008\u000b-\u001f\u007f]/g, (c) => (c === "\u007f" ? "\u2421" : String.fromCharCode(0x2400 + c.charCodeAt(0))))
    .replace(UNSEEN, (found) => [...found].map((c) => `\u27e8U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}\u27e9`).join(""));
}

// The same on one line, for cells and lists.
function flat(piece) {
  return piece === "" ? "∅" : seen(piece).replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ | $/g, "␣");
}

function look(name) {
  return DATA.looks.indexOf(name);
}

function marks(name) {
  return name === "target" ? "" : `d s${look(name)} u${STROKES[name] ?? 3 + (look(name) % 2)}`;
}

// One trace of the page, and which of its texts and steps is looked at.
class Side {
  constructor(trace, place) {
    Object.assign(this, { trace, place, letter: "AB"[place], row: -1 });
    this.show(0);
  }

  show(index) {
    this.index = Math.min(index, this.trace.texts.length - 1);
    this.text = this.trace.texts[this.index] ?? NOTHING;
    this.rows = this.text.rows;
    this.at = new Map(this.rows.map((row, i) => [row, i]));
    this.row = -1;
    this.firsts = new Map(); // row -> [first, end) of the pieces that it wrote
    const { by: writers, prompt } = this.text;
    for (let g = 0; g < writers.length; ) {
      let end = g + 1;
      while (end < writers.length && writers[end] === writers[g]) end++;
      if (writers[g] >= 0) this.firsts.set(writers[g], [prompt + g, prompt + end]);
      g = end;
    }
  }

  get(name, row) {
    const column = this.trace.steps[name];
    return column === null ? null : column[row];
  }

  string(id) {
    return this.trace.strings[id] ?? `#${id}`;
  }

  parents(row) {
    return this.get("parents", row) ?? this.get("tokens", row).map((_, i) => i - 1);
  }

  source(row, node) {
    const found = this.get("source", row);
    return this.trace.sources[typeof found === "number" ? found : found[node]];
  }

  drafters(row) {
    return this.get("drafters", row).map((i) => this.trace.sources[i]);
  }

  copied(row) {
    return this.drafters(row).includes("copy");
  }

  falseCopy(row) {
    return this.copied(row) && this.get("accepted", row).length === 0;
  }

  rejected(row) {
    return this.get("tokens", row).length > this.get("accepted", row).length;
  }

  written(row) {
    const tokens = this.get("tokens", row);
    return [...this.get("accepted", row).map((node) => tokens[node]), this.get("pending", row)];
  }

  // How many of the tokens that a step wrote were cut: they stood behind the text's end.
  cut(row) {
    const range = this.firsts.get(row);
    if (!this.text.known || !range || range[1] < this.text.pieces.length) return 0;
    return this.get("accepted", row).length + 1 - (range[1] - range[0]);
  }

  intent(row) {
    return this.get("intent", row);
  }

  // The gate's threshold, where it is one that can be drawn: not of a gate without, nor of one that never copies.
  get tau() {
    const tau = this.trace.about?.tau;
    return typeof tau === "number" ? tau : null;
  }

  seconds(row) {
    return (this.get("draft_ms", row) + this.get("verify_ms", row) + this.get("rest_ms", row)) / 1e3;
  }

  // Pieces of the suffix match, its source and the candidate: [first, end) each, or null where the text lacks them.
  match(row) {
    const n = this.get("match_length", row);
    if (!this.text.matched[this.at.get(row)]) return null;
    const from = this.get("match_start", row) - this.text.start;
    const last = this.get("position", row) + 1 - this.text.start;
    const copied = this.get("tokens", row).length && this.copied(row) ? this.reach(row, "copy") : 0;
    return { own: [last - n, last], source: [from - n, from], candidate: [from, Math.min(from + (copied || 5), last)] };
  }

  // Length of the longest path of one drafter's nodes.
  reach(row, name) {
    const parents = this.parents(row);
    const depths = [];
    let most = 0;
    parents.forEach((parent, i) => {
      const above = parent < 0 ? 0 : depths[parent];
      depths.push(this.source(row, i) === name ? above + 1 : above);
      most = Math.max(most, depths[i]);
    });
    return most;
  }
}

const NOTHING = { mode: "", known: true, start: 0, prompt: 0, pieces: [], source: [], by: [], node: [], rows: [], matched: [],
  summary: { written: 0, steps: 0, rows: 0, seconds: 0, copied: 0, false_copies: 0, drafted: {}, kept: {}, against_target: 0 } };

// Work that may wait for the next frame, once.
function framed(act) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      act();
    });
  };
}
