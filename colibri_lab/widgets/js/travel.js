// The time line: hold the picture, go back, step by token, return; save the run. The kernel makes the pictures.
class TravelBar {
  constructor(board) {
    this.board = board; this.until = 0; this.timer = 0; this.key = "";
    const id = Math.random().toString(36).slice(2), button = (words, label, act) => {
      const node = h("button", {type: "button", "aria-label": label, title: label}, words);
      node.addEventListener("click", act);
      return node;
    };
    this.hold = button("", null, () => this.toggle());
    this.back = button("◀", "one token back", () => board.send({do: "step", by: -1}));
    this.next = button("▶", "one token on", () => board.send({do: "step", by: 1}));
    this.range = own(h("input", {type: "range", min: "0", max: "1", step: "1", "aria-label": "token that the board shows"}));
    this.range.addEventListener("input", () => this.moved());
    this.range.addEventListener("keydown", (e) => { if (e.key === "Escape") board.send({do: "live"}); });
    this.ticks = h("div", {class: "cl-ticks", "aria-hidden": "true"});
    this.say = h("span", {class: "cl-when", role: "status"});
    this.name = own(h("input", {id: `s${id}`, maxlength: "100", size: "12", spellcheck: "false"}));
    this.save = button("Save run", null, () => { board.send({do: "save", name: this.name.value || this.name.placeholder}); this.name.value = ""; });
    this.name.addEventListener("keydown", (e) => { if (e.key === "Enter") this.save.click(); });
    this.said = h("span", {class: "cl-saved", role: "status"});
    this.node = h("section", {class: "cl-card cl-travel", role: "group", "aria-label": "time line"}, h("div", {class: "cl-rail"}, this.hold, this.back, this.next, h("div", {class: "cl-slide"}, this.range, this.ticks)),
      h("div", {class: "cl-foot"}, this.say, h("span", {class: "cl-file"}, h("label", {for: `s${id}`}, "file"), this.name, this.save), this.said));
    board.model.on("change:moments", this.told = () => board.redraw());
  }
  dispose() { this.board.model.off("change:moments", this.told); clearTimeout(this.timer); }
  get past() { return this.board.frame.past; }
  toggle() { this.board.send(this.held ? {do: "live"} : {do: "seek", token: this.past.at < 0 ? this.past.last : this.past.at}); }
  moved() {
    this.until = performance.now() + 500;  // what comes back in the meantime is older than the hand
    if (this.timer) return;
    this.timer = setTimeout(() => { this.timer = 0; this.board.send({do: "seek", token: Number(this.range.value)}); }, 40);
  }
  request(token) {
    const begun = (this.board.model.get("moments").starts || []).filter(([number]) => number <= token);
    return begun.length ? `, request ${begun[begun.length - 1][1]}` : "";
  }
  words(p) {
    if (p.last < p.first) return "no token to go back to yet";
    const kept = p.first ? ` (those before ${whole(p.first)} are no longer kept)` : "";
    if (p.at < 0) return `newest token, number ${whole(p.last)}${kept}`;
    return `token ${whole(p.at)} of ${whole(p.last)}${this.request(p.at)}, ${p.ago < 0.1 ? "just now" : `${num(p.ago)} s before the newest`}${kept}`;
  }
  draw(f) {
    const p = f.past, live = this.board.live;
    this.node.hidden = !p;
    if (!p) return;
    const recorded = !(this.board.model.get("can") || []).includes("prompt"), some = live && p.last >= p.first;
    this.held = p.at >= 0 && f.state !== "replay";
    this.board.root.classList.toggle("cl-held", this.held);
    put(this.hold, this.held ? (recorded ? "■ To the end" : "● Live") : "❚❚ Hold");
    this.hold.classList.toggle("cl-go", this.held);
    this.hold.disabled = this.range.disabled = !some;
    this.back.disabled = !some || p.at === p.first || p.last === p.first;
    this.next.disabled = !some || p.at < 0 || p.at >= p.last;
    this.save.disabled = this.name.disabled = !live;
    const words = this.words(p), value = String(p.at < 0 ? p.last : Math.max(p.at, p.first));
    Object.assign(this.range, {min: Math.min(p.first, p.last), max: Math.max(p.last, p.first)});
    if (performance.now() > this.until && this.range.value !== value) this.range.value = value;
    put(this.say, words);
    this.range.setAttribute("aria-valuetext", words);
    this.marks(p);
  }
  marks(p) {
    const told = this.board.model.get("moments") || {}, key = JSON.stringify([told, p.first, p.last]);
    if (key === this.key) return;
    this.key = key;
    const place = (number) => `calc(8px + (100% - 16px) * ${(Math.min(number, p.last) - p.first) / Math.max(1, p.last - p.first)})`;
    const mark = (kind, number, title) => h("i", {class: kind, style: `left:${place(number)}`, title});
    this.ticks.replaceChildren(...(told.starts || []).filter(([n]) => n >= p.first).map(([n, s]) => mark("start", n, `request ${s} begins at token ${n}`)),
      ...(told.gaps || []).filter(([n]) => n >= p.first).map(([n, missed]) => mark("gap", n, `${missed} missed before token ${n}`)));
    put(this.said, told.said || "");
    this.name.placeholder = told.name || "run.trace";
  }
}
