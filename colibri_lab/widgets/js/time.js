// One column a token: where its time went above, what its experts cost below.
class TimePanel {
  constructor(board) {
    this.board = board;
    Object.assign(this, card("time", "Time"));
    this.tabled = new TableView(board, this, "Time");
    this.surface = new Surface(board, this, 176, {pick: (x) => this.pick(x), walk: (dx) => this.walk(dx)});
  }
  get space() { return {left: 46, top: 6, mid: 112, low: 122, zero: 152, bottom: 174, columns: 120}; }
  at(i) { const s = this.space, n = this.board.frame.a.flag.length; return s.left + (s.columns - n + i) * (this.surface.width - s.left) / s.columns; }
  pick(x) {
    const f = this.board.frame, s = this.space;
    if (!f || !f.a.flag.length) return null;
    const i = Math.floor((x - this.at(0)) / ((this.surface.width - s.left) / s.columns));
    return i >= 0 && i < f.a.flag.length ? tokenFocus(f, i) : null;
  }
  walk(dx) {
    const f = this.board.frame, n = f ? f.a.flag.length : 0;
    if (!n) return null;
    const now = stripColumn(f, this.board.focus);
    return tokenFocus(f, Math.max(0, Math.min(n - 1, now < 0 ? n - 1 : now + dx)));
  }
  // the columns that are pointed at from elsewhere: an expert's tokens, a latency bin's, a moment's; and what they are
  others(f) {
    const at = this.board.focus, all = [...f.a.flag.keys()];
    if (!at) return [[], ""];
    if (at.kind === "expert") {
      const found = columnsOf(this.board.story, f, at.layer, at.expert);
      return [found, `${many(found.length, "token")} of these went to it`];
    }
    if (at.kind === "bin") {
      const found = all.filter((i) => f.a.bin[i] === at.bin);
      return [found, `${many(found.length, "token")} of these took so long`];
    }
    if (at.kind === "column") {
      const found = all.filter((i) => momentOf(f, i) === at.column);
      return [found, `${many(found.length, "token")} of that moment`];
    }
    return [[], ""];
  }
  // faults, hits, evictions
  counts(f, i) { const wide = f.a.count.shape[1]; return f.a.count.subarray(i * wide, i * wide + 3); }
  total(f, i) {
    let sum = 0;
    for (let k = 0; k < STAGES.length; k++) sum += f.a.stage[i * STAGES.length + k];
    return sum * f.unit_us / 1000;
  }
  describe(f, i) {
    const parts = STAGES.map(([name], k) => [name, f.a.stage[i * STAGES.length + k] * f.unit_us / 1000]).filter((p) => p[1] > 0).sort((a, b) => b[1] - a[1]);
    const [faults, hits, gone] = this.counts(f, i), prompt = f.a.flag[i] & 1;
    const head = prompt ? "prompt step, a row" : `token ${f.a.place[i] + 1}`;
    return `${head}: ${ms(this.total(f, i))}` + (parts.length ? ` (${parts.slice(0, 3).map(([n, v]) => `${n} ${ms(v)}`).join(", ")})` : "") +
      `, ${many(faults, "fault")}, ${many(hits, "hit")}, ${gone} evicted`;
  }
  // the top of the scale: a round number over nearly all columns; the few beyond it are cut and marked
  scale(f) {
    const all = [];
    for (let i = 0; i < f.a.flag.length; i++) if (!(f.a.flag[i] & 1)) all.push(this.total(f, i));
    if (!all.length) return 1;
    all.sort((a, b) => a - b);
    const most = all[all.length - 1], usual = all[all.length >> 1] * 4;
    const want = Math.min(most, usual) * 1.08 || 1, power = 10 ** Math.floor(Math.log10(want));
    return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((m) => m * power >= want) * power;
  }
  draw(f) {
    const n = f.a.flag.length, s = this.space, theme = this.board.theme, top = this.scale(f);
    const sums = [0, 0, 0];
    for (let i = 0; i < n; i++) this.counts(f, i).forEach((v, k) => { sums[k] += v; });
    const g = this.surface.begin(n ? `Time of the last ${n} tokens: ${sums[0]} faults, ${sums[1]} hits, ${sums[2]} evicted. Newest: ${this.describe(f, n - 1)}` : "Time: no token yet");
    const w = (this.surface.width - s.left) / s.columns, bar = w > 3 ? w - 1 : w;
    this.axes(g, f, top);
    let most = 1;
    for (let i = 0; i < n; i++) if (!(f.a.flag[i] & 1)) most = Math.max(most, this.counts(f, i)[0] + this.counts(f, i)[1]);
    const tall = s.mid - s.top, up = s.zero - s.low, down = s.bottom - s.zero;
    for (let i = 0; i < n; i++) {
      const x = this.at(i), flag = f.a.flag[i];
      if (flag & 1) { g.fillStyle = rgba("#999999", 0.18); g.fillRect(x, s.top, w, s.bottom - s.top); }
      let y = s.mid;
      for (let k = 0; k < STAGES.length && y > s.top; k++) {
        const v = Math.min(f.a.stage[i * STAGES.length + k] * f.unit_us / 1000 / top * tall, y - s.top);
        g.fillStyle = STAGES[k][1];
        g.fillRect(x, y - v, bar, v); y -= v;
      }
      if (this.total(f, i) > top) { g.fillStyle = theme.fg; g.fillRect(x, s.top - 3, bar, 2); }
      const [faults, hits, gone] = this.counts(f, i), a = Math.min(hits / most, 1) * up, b = Math.min(faults / most * up, up - a), c = Math.min(gone / most, 1) * down;
      g.fillStyle = rgba(HIT, 0.45); g.fillRect(x, s.zero - a, bar, a);
      g.fillStyle = FAULT; g.fillRect(x, s.zero - a - b, bar, b);
      g.fillStyle = EVICTED; g.fillRect(x, s.zero + 1, bar, c);
      if (flag & 2) this.gap(g, f, i, x);
    }
    const here = stripColumn(f, this.board.focus), [others, words] = this.others(f);
    g.fillStyle = theme.fg;
    for (const i of others) { g.fillRect(this.at(i), s.bottom, bar, 2); g.fillRect(this.at(i), s.mid + 2, bar, 2); }
    if (here >= 0) { g.strokeStyle = theme.fg; g.lineWidth = 1.5; g.strokeRect(this.at(here) - 1, s.top - 2, bar + 2, s.bottom - s.top + 2); }
    put(this.readout, here >= 0 ? this.describe(f, here) : words);
    const missed = f.missed ? ` · ${whole(f.missed)} events missed` : "";
    put(this.sub, n ? `the last ${many(n, "token")}, one column each${missed}` : "one column a token");
    setLegend(this.legend, [...STAGES, ["expert faults", FAULT], ["hits", rgba(HIT, 0.6)], ["evicted", EVICTED], ...(f.a.flag.some((v) => v & 1) ? [["prompt", rgba("#999999", 0.35)]] : [])]);
  }
  gap(g, f, i, x) {
    let nth = 0;
    for (let j = 0; j < i; j++) nth += f.a.flag[j] >> 1 & 1;
    g.fillStyle = MARK; g.fillRect(x - 1, this.space.top, 1.5, this.space.bottom - this.space.top);
    g.fillText(`${whole(f.gaps[nth])} missed`, x + 4, this.space.top + 6);
  }
  axes(g, f, top) {
    const s = this.space, theme = this.board.theme;
    g.fillStyle = theme.mute; g.textAlign = "right";
    for (const [share, text] of [[0, "0"], [0.5, short(top / 2)], [1, `${short(top)} ms`]]) {
      const y = s.mid - share * (s.mid - s.top);
      g.fillText(text, s.left - 6, Math.max(y, 6));
      g.fillStyle = theme.line; g.fillRect(s.left, Math.round(y), this.surface.width - s.left, 1); g.fillStyle = theme.mute;
    }
    g.fillText("experts", s.left - 3, s.zero - 8);
    g.fillStyle = theme.line; g.fillRect(s.left, s.zero, this.surface.width - s.left, 1);
    g.textAlign = "left";
  }
  table(f) {
    const n = f.a.flag.length, first = Math.max(0, n - 32), part = (i, k) => ms(f.a.stage[i * STAGES.length + k] * f.unit_us / 1000), wide = f.a.count.shape[1];
    const rows = Array.from({length: n - first}, (_, j) => {
      const i = n - 1 - j;
      return [f.a.flag[i] & 1 ? "prompt step" : `token ${f.a.place[i] + 1}`, ms(this.total(f, i)), ...STAGES.map((_, k) => part(i, k)), ...f.a.count.subarray(i * wide, (i + 1) * wide)];
    });
    return {caption: `Time of the last ${many(rows.length, "token")}, newest first; a prompt step's is of one of its rows`,
      head: ["", "in all", ...STAGES.map(([name]) => name), "faults", "hits", "evicted", "hits of guesses", "guesses wasted"], rows};
  }
}
