// The text as it comes, each token tinted by its first expert in one layer. Nodes are added, never rebuilt.
class ProsePanel {
  constructor(board) {
    this.board = board; this.revision = -1; this.nodes = new Map(); this.shown = -1;
    Object.assign(this, card("prose", "Text"));
    this.tabled = new TableView(board, this, "Text");
    this.layer = h("select", {"aria-label": "layer that tints the text"});
    this.sub.append("tint: first expert of ", this.layer);
    this.text = h("div", {class: "cl-text", tabindex: "0", role: "log", "aria-live": "off", "aria-label": "generated text"});
    this.prompt = h("span", {class: "cl-prompt"});
    this.cursor = h("span", {class: "cl-cursor", "aria-hidden": "true"}, "▍");
    this.text.append(this.prompt, this.cursor);
    this.body.append(this.text);
    this.layer.addEventListener("change", () => { this.tintAll(); board.redraw(); });
    this.text.addEventListener("pointerover", (e) => {
      const at = e.target.dataset && e.target.dataset.at;
      board.setFocus(at ? {kind: "token", at: Number(at)} : null);
    });
    this.text.addEventListener("click", (e) => { const at = e.target.dataset && e.target.dataset.at; if (at) board.token.ask(Number(at)); });
    this.text.addEventListener("pointerleave", () => board.setFocus(null));
    this.text.addEventListener("blur", () => board.setFocus(null));
    this.text.addEventListener("keydown", (e) => this.key(e));
  }
  key(e) {
    if (e.key === "t") { this.tabled.turn(); e.preventDefault(); e.stopPropagation(); }
    const pieces = this.board.story.told, step = {ArrowLeft: -1, ArrowRight: 1}[e.key];
    if (e.key === "Escape") { this.board.setFocus(null); this.board.token.shut(); }
    if (e.key === "Enter" && this.board.focus && this.board.focus.kind === "token" && this.board.focus.at >= 0) this.board.token.ask(this.board.focus.at);
    if (!step || !pieces.length) return;
    const at = this.board.focus, now = at && at.kind === "token" ? pieces.findIndex((p) => p.at === at.at) : pieces.length;
    const next = pieces[Math.max(0, Math.min(pieces.length - 1, now + step))];
    this.board.setFocus({kind: "token", at: next.at});
    e.preventDefault(); e.stopPropagation();
  }
  expert(piece) {
    const v = piece.route[this.tint * piece.k];
    return v === undefined || v === piece.none ? -1 : v;
  }
  paint(node, piece) {
    const expert = this.expert(piece);
    node.style.background = expert < 0 ? "" : rgba(OKABE[expert % 8], this.board.dark ? 0.3 : 0.22);
  }
  tintAll() {
    this.tint = Number(this.layer.value || 0);
    for (const piece of this.board.story.pieces) { const node = this.nodes.get(piece.at); if (node) this.paint(node, piece); }
  }
  draw(f) {
    if (this.layer.options.length !== f.L) {
      this.layer.replaceChildren(...Array.from({length: f.L}, (_, i) => h("option", {value: i}, `layer ${i}`)));
      this.layer.value = String(Math.min(f.L - 1, Math.round(f.L * 0.6))); this.tint = Number(this.layer.value);
    }
    const story = this.board.story, low = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 30;
    if (story.revision !== this.revision) {
      this.revision = story.revision; this.nodes.forEach((node) => node.remove()); this.nodes.clear(); this.shown = -1;
    }
    put(this.prompt, story.prompt);
    if (this.shown > story.end) {
      this.shown = story.end;
      for (const [at, node] of this.nodes) if (at > story.end) { node.remove(); this.nodes.delete(at); }
    }
    let added = false;
    const told = story.told;
    for (const piece of told) {
      if (piece.at <= this.shown) continue;
      const node = h("span", {class: "cl-piece", "data-at": piece.at}, piece.text);
      this.paint(node, piece);
      this.cursor.before(node); this.nodes.set(piece.at, node); this.shown = piece.at; added = true;
    }
    const first = told.length ? told[0].at : 0;
    if (this.nodes.size > told.length) for (const [at, node] of this.nodes) if (at < first) { node.remove(); this.nodes.delete(at); }
    this.cursor.hidden = f.state !== "generating" || (f.past && f.past.at >= 0);
    if (added && low) this.text.scrollTop = this.text.scrollHeight;
    this.marks(f);
  }
  marks(f) {
    const at = this.board.focus, story = this.board.story;
    const here = focusedPiece(story, f, at), owner = ownerOf(f, at);
    let count = 0, chosen = null;
    for (const piece of story.pieces) {
      const node = this.nodes.get(piece.at);
      if (!node) continue;
      const on = at && (at.kind === "token" ? piece === here : at.kind === "expert" ? visits(piece, at.layer, at.expert) : owner && piece.route[owner.layer * piece.k] === owner.who);
      if (on) { count++; chosen = piece; }
      node.classList.toggle("on", Boolean(on));
      node.classList.toggle("cl-chosen", this.board.token.is(piece));
    }
    let says = "";
    if (at && at.kind === "expert" && story.pieces.length) says = `${many(count, "token")} of this text went to it`;
    if (owner && story.pieces.length) says = `${many(count, "token")} went to its owner first`;
    if (at && at.kind === "layer" && story.pieces.length) says = this.layerWords(at.layer);
    if (at && at.kind === "token" && chosen) says = `token ${chosen.at} ${JSON.stringify(chosen.text)}: ` + this.route(chosen);
    put(this.readout, says);
    const seen = new Map();
    for (const piece of story.told) { const e = this.expert(piece); if (e >= 0) seen.set(e, (seen.get(e) || 0) + 1); }
    const top = [...seen].sort((a, b) => b[1] - a[1] || a[0] - b[0]).slice(0, 6);
    setLegend(this.legend, top.map(([e, n]) => [`expert ${e}: ${n}`, rgba(OKABE[e % 8], 0.55)]));
  }
  layerWords(layer) {
    const firsts = new Set();
    for (const piece of this.board.story.told) { const e = piece.route[layer * piece.k]; if (e !== undefined && e !== piece.none) firsts.add(e); }
    return `${many(firsts.size, "expert")} of layer ${layer} ${firsts.size === 1 ? "was" : "were"} first for a token of this text`;
  }
  table() {
    const pieces = this.board.story.told.slice(-64).reverse(), layer = Number(this.layer.value || 0);
    return {caption: `The newest ${many(pieces.length, "token")} of the text, newest first`, head: ["", "text", `first expert of layer ${layer}`, "experts by layer"],
      rows: pieces.map((piece) => [`token ${piece.at}`, JSON.stringify(piece.text), this.expert(piece) < 0 ? "–" : this.expert(piece), this.route(piece).replace("experts by layer ", "")])};
  }
  route(piece) {
    const parts = [];
    for (let l = 0; l * piece.k < piece.route.length && l < 12; l++) parts.push([...piece.route.subarray(l * piece.k, (l + 1) * piece.k)].map((e) => (e === piece.none ? "–" : e)).join("+"));
    return `experts by layer ${parts.join("  ")}`;
  }
}
