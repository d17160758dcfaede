// The board: one model, one animation frame at a time, the newest picture wins.
const SLOW = ["pool", "lines", "map"];  // what moves less than tokens comes in blocks of its own

class Board {
  // views: all that show this model; only: the name of one panel that stands alone
  constructor(model, el, views, only = null) {
    this.model = model; this.el = el; this.views = views; this.blocks = {}; this.frame = null; this.story = new Story(); this.focus = null;
    this.pending = 0; this.updates = 0; this.draws = 0; this.live = true; this.words = "";
    this.root = h("div", {class: "cl-board", role: "region", "aria-label": "Colibri Lab board"});
    this.banner = h("div", {class: "cl-banner", role: "alert"});
    this.banner.hidden = true;
    this.trouble = h("div", {class: "cl-banner cl-bad", role: "alert"});
    this.trouble.hidden = true;
    this.caption = h("div", {class: "cl-caption"}, h("b", null, "Colibri Lab"), h("span"));
    this.panels = [];
    const make = (panel) => { this.panels.push(panel); return panel; };
    if (!only || only === "text") this.token = make(new TokenPanel(this));
    if (only) this.root.append(this.banner, this.trouble, make(this.alone(only)).node, ...(this.token ? [this.token.node] : []));
    else {
      const [travel, experts, time, controls] = [make(new TravelBar(this)), make(new ExpertsPanel(this)), make(new TimePanel(this)), make(new ControlsPanel(this))];
      const [prose, slots, latency] = [make(new ProsePanel(this)), make(new SlotsPanel(this)), make(new LatencyPanel(this))];
      const study = make(new StudyPanel(this, [new ComparePage(this), new WhatIfPage(this), new TunerPage(this)]));
      this.root.append(this.caption, this.banner, this.trouble, make(new Tiles(this)).node, travel.node, h("div", {class: "cl-grid"},
        h("div", {class: "cl-col"}, experts.node, time.node, prose.node, this.token.node), h("div", {class: "cl-col"}, controls.node, slots.node, latency.node)),
      make(new SystemsPanel(this)).node, study.node);
    }
    el.append(this.root);
    this.watch();
    this.looking = new Looking(this);
    this.text();
    this.arrived();
    views.add(this);
    this.send({do: "hello"});
  }
  alone(name) {
    this.root.classList.add("cl-alone");
    const kinds = {experts: ExpertsPanel, time: TimePanel, kv: SlotsPanel, latency: LatencyPanel, text: ProsePanel};
    const pages = {whatif: WhatIfPage, tuner: TunerPage};
    if (pages[name]) return new StudyPanel(this, [new pages[name](this)]);
    return kinds[name] ? new kinds[name](this) : new SystemsPanel(this, name);
  }
  watch() {
    const on = (name, act) => { this.model.on(name, act); return () => this.model.off(name, act); };
    const slow = () => requestAnimationFrame(() => this.arrived(false));
    this.off = [...SLOW.map((name) => on(`change:${name}`, slow)), on("change:frame", () => { this.connected(true); this.arrived(); }), on("change:prose", () => this.text()),
      on("comm_live_update", () => this.connected(false)), on("change:can", () => this.redraw()), on("change:pointed", () => this.redraw())];
    this.size = new ResizeObserver(() => this.redraw());
    this.size.observe(this.root);
    // many panels say what is pointed at; read aloud is the one that has the keyboard
    this.root.addEventListener("focusin", () => this.aloud());
    this.aloud();
    this.themes = new MutationObserver(() => this.restyle());
    for (const node of [document.body, document.documentElement]) this.themes.observe(node, {attributes: true});
    // a picture that was saved comes up in an element that JupyterLab has marked; what happens later is an event
    requestAnimationFrame(() => { if (this.el.closest(".jupyter-widgets-disconnected")) this.connected(false); });
    this.restyle();
  }
  dispose() {
    this.views.delete(this);
    this.looking.dispose();
    this.off.forEach((stop) => stop());
    this.size.disconnect(); this.themes.disconnect();
    for (const panel of this.panels) if (panel.dispose) panel.dispose();
    cancelAnimationFrame(this.pending);
    clearTimeout(this.asking);
  }
  aloud() {
    for (const {node} of this.panels) for (const say of node.querySelectorAll("[role=status]")) {
      say.setAttribute("aria-live", node.contains(document.activeElement) ? "polite" : "off");
    }
  }
  send(message) { this.model.send(message); }
  restyle() {
    const light = document.body.dataset.jpThemeLight;
    this.dark = light ? light === "false" : matchMedia("(prefers-color-scheme: dark)").matches;
    this.root.dataset.theme = this.dark ? "dark" : "light";
    this.theme = readTheme(this.root);
    for (const panel of this.panels) if (panel.tint !== undefined) panel.tintAll();
    this.redraw();
  }
  // the kernel went away, or speaks again
  connected(live) {
    if (live === this.live) return;
    this.live = live;
    this.banner.hidden = live;
    put(this.banner, live ? "" : "The kernel was restarted or is not running: this is the last picture. Run the cell again.");
    this.root.classList.toggle("cl-gone", !live);
    this.redraw();
  }
  // a frame with the newest of each of its slower parts
  arrived(fresh = true) {
    const frame = parseFrame(this.model.get("frame"));
    if (!frame) return;
    const parts = SLOW.map((name) => this.part(name)), a = Object.assign({}, ...parts.map((p) => p.a), frame.a);
    this.frame = Object.assign({}, ...parts, frame, {a});
    if (fresh) this.updates++;
    if (!this.story.take(frame)) this.send({do: "hello"});
    this.redraw();
  }
  part(name) {
    const bytes = this.model.get(name), known = this.blocks[name];
    if (!known || known.bytes !== bytes) this.blocks[name] = {bytes, part: parseFrame(bytes) || {a: {}}};
    return this.blocks[name].part;
  }
  text() {
    this.story.replace(parseFrame(this.model.get("prose")));
    this.redraw();
  }
  // what is pointed at here is marked in every view of this model, in whatever cell it is
  setFocus(focus) {
    const known = (at) => at && (at.kind === "expert" || at.kind === "slot");
    if (JSON.stringify(focus) !== this.words && (known(focus) || known(this.focus))) this.point(known(focus) ? focus : {});
    for (const view of this.views) view.focused(focus);
  }
  focused(focus) {
    const words = JSON.stringify(focus);
    if (words === this.words) return;
    this.words = words; this.focus = focus;
    this.redraw();
  }
  // the kernel tells more of an expert or a slot that somebody looks at
  point(focus) {
    clearTimeout(this.asking);
    this.asking = setTimeout(() => this.send({...focus, do: "point"}), 100);
  }
  // what the kernel told of what is pointed at, null until it did
  told(kind, key) {
    const told = this.model.get("pointed") || {};
    return told.kind === kind && Object.entries(key).every(([name, value]) => told[name] === value) ? told : null;
  }
  redraw() {
    if (!this.pending) this.pending = requestAnimationFrame(() => { this.pending = 0; this.draw(); });
  }
  draw() {
    const f = this.frame;
    if (!f || !f.a.slot || !f.a.cell || !f.systems || !this.root.isConnected || !this.root.clientWidth) return;
    this.draws++;
    if (!this.theme.fg) this.restyle();  // the style sheet came after the board
    this.root.classList.toggle("cl-narrow", this.root.clientWidth < 860);
    for (const panel of this.panels) (panel.tabled && panel.tabled.on ? panel.tabled : panel).draw(f);
    put(this.caption.lastChild, f.model || "");
    this.trouble.hidden = !f.error;
    put(this.trouble, f.error || "");
    Object.assign(this.root.dataset, {updates: this.updates, draws: this.draws, state: f.state});
  }
}

// all views of one model share what is pointed at: the board, shown once or more, and its panels in other cells
export default () => {
  const views = new Set();
  const open = (model, el, only) => { const board = new Board(model, el, views, only); return () => board.dispose(); };
  return {
    initialize: ({model}) => ({open: (el, only) => open(model, el, only)}),
    render: ({model, el}) => open(model, el, null),
  };
};
