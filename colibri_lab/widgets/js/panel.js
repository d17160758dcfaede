// A card with a title, a canvas that is crisp on every screen, a legend and a readout in words.
function card(name, title) {
  // what is under the pointer takes the subtitle's place, so that nothing moves
  const sub = h("span", {class: "cl-sub"}), body = h("div", {class: "cl-body"}), readout = h("span", {class: "cl-read", role: "status"});
  const legend = h("div", {class: "cl-legend"}), foot = h("div", {class: "cl-foot"}, legend), tools = h("span", {class: "cl-tools"});
  const head = h("div", {class: "cl-head"}, h("b", {role: "heading", "aria-level": "3"}, title), sub, readout, tools);
  const node = h("section", {class: `cl-card cl-${name}`, "aria-label": title}, head, body, foot);
  return {node, sub, body, legend, readout, foot, tools};
}

// Arrow keys, Home and End go from tab i of a panel to another.
function stepTab(panel, e, i) {
  const there = panel.tabs.map((tab, j) => j).filter((j) => !panel.tabs[j].hidden), n = there.length, at = there.indexOf(i);
  const to = there[{ArrowLeft: (at + n - 1) % n, ArrowRight: (at + 1) % n, Home: 0, End: n - 1}[e.key]];
  if (to === undefined) return;
  panel.choose(to); panel.tabs[to].focus();
  e.preventDefault(); e.stopPropagation();
}

// entries: [text, colour, kind]; kind: "" a filled box, "ring" an outline, "line" a line. Rebuilt only when it changes.
function setLegend(node, entries) {
  const key = JSON.stringify(entries);
  if (node.dataset.key === key) return;
  node.dataset.key = key;
  node.replaceChildren(...entries.map(([text, colour, kind]) =>
    h("span", {class: "cl-key"}, h("i", {class: kind || "", style: `--c:${colour}`, "aria-hidden": "true"}), text)));
}

class Surface {
  // pick(x, y) -> focus or null; walk(dx, dy) -> focus or null; both in CSS pixels / steps; keys: what a letter does
  constructor(board, panel, height, {pick, walk, keys}) {
    const letters = {...keys, ...(panel.tabled ? {t: () => panel.tabled.turn()} : {})};
    this.board = board; this.height = height; this.width = 0;
    this.canvas = h("canvas", {role: "img", tabindex: "0", style: `height:${height}px`, "aria-keyshortcuts": Object.keys(letters).join(" ") || null});
    panel.body.append(this.canvas);
    this.g = this.canvas.getContext("2d");
    const focus = (found) => board.setFocus(found);
    this.canvas.addEventListener("pointermove", (e) => focus(pick(e.offsetX, e.offsetY)));
    this.canvas.addEventListener("pointerleave", () => focus(null));
    this.canvas.addEventListener("blur", () => focus(null));
    this.canvas.addEventListener("keydown", (e) => {
      const step = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]}[e.key];
      if (e.key === "Escape") focus(null);
      if (letters[e.key] && !e.ctrlKey && !e.metaKey && !e.altKey) { letters[e.key](); e.preventDefault(); e.stopPropagation(); }
      if (!step) return;
      focus(walk(step[0] * (e.shiftKey ? 10 : 1), step[1] * (e.shiftKey ? 10 : 1)));
      e.preventDefault(); e.stopPropagation();  // else the notebook moves to another cell
    });
  }
  setHeight(height) {
    if (height === this.height) return;
    this.height = height; this.canvas.style.height = `${height}px`;
  }
  // sizes the canvas to the screen's own pixels, clears it and returns its context in CSS pixels
  begin(label) {
    const ratio = window.devicePixelRatio || 1, width = this.canvas.clientWidth;
    this.width = width;
    const w = Math.round(width * ratio), t = Math.round(this.height * ratio);
    if (this.canvas.width !== w || this.canvas.height !== t) { this.canvas.width = w; this.canvas.height = t; }
    if (this.canvas.getAttribute("aria-label") !== label) this.canvas.setAttribute("aria-label", label);
    const g = this.g;
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, width, this.height);
    g.font = `11px ${this.board.theme.font}`;
    g.textBaseline = "middle"; g.textAlign = "left";
    return g;
  }
}
