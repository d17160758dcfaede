// How long a decoded token takes: histogram, share of tokens below (line), P50, P95 and P99; prompts are told apart.
class LatencyPanel {
  constructor(board) {
    this.board = board;
    Object.assign(this, card("latency", "Latency"));
    this.tabled = new TableView(board, this, "Latency");
    this.surface = new Surface(board, this, 148, {pick: (x) => this.pick(x), walk: (dx) => this.walk(dx)});
  }
  pick(x) {
    const f = this.board.frame;
    if (!f) return null;
    const bin = Math.floor(x / this.surface.width * f.a.bins.length);
    return bin >= 0 && bin < f.a.bins.length ? {kind: "bin", bin} : null;
  }
  walk(dx) {
    const f = this.board.frame, at = this.board.focus;
    return f ? {kind: "bin", bin: Math.max(0, Math.min(f.a.bins.length - 1, at && at.kind === "bin" ? at.bin + dx : 0))} : null;
  }
  range(f, bin) {
    const step = f.ms_end / f.a.bins.length;
    return bin === f.a.bins.length - 1 ? `over ${ms(bin * step)}` : `${ms(bin * step)} to ${ms((bin + 1) * step)}`;
  }
  describe(f, bin, total) { return `${this.range(f, bin)}: ${many(f.a.bins[bin], "token")} (${percent(total ? f.a.bins[bin] / total : 0)})`; }
  // how many of the strip's tokens that are pointed at fell into each bin, and what they are
  found(f) {
    const at = this.board.focus, counts = new Map(), i = stripColumn(f, at);
    let columns = i >= 0 ? [i] : [], words = "";
    if (at && at.kind === "expert") columns = columnsOf(this.board.story, f, at.layer, at.expert);
    if (at && at.kind === "column") columns = [...f.a.flag.keys()].filter((j) => momentOf(f, j) === at.column);
    columns = columns.filter((j) => f.a.bin[j] !== 255);
    for (const j of columns) counts.set(f.a.bin[j], (counts.get(f.a.bin[j]) || 0) + 1);
    if (i >= 0 && columns.length) words = `this token: ${this.range(f, f.a.bin[i])}`;
    else if (columns.length) {
      const sorted = columns.map((j) => f.a.bin[j]).sort((a, b) => a - b);
      words = `its ${many(columns.length, "token")}: half below ${ms((sorted[sorted.length >> 1] + 1) * f.ms_end / f.a.bins.length)}`;
    }
    return [counts, words];
  }
  draw(f) {
    const bins = f.a.bins, n = bins.length, theme = this.board.theme, [p50, p95, p99, longest] = f.ms;
    const total = bins.reduce((a, b) => a + b, 0), most = Math.max(1, ...bins), [marks, words] = this.found(f);
    const g = this.surface.begin(total ? `Latency of ${total} tokens: P50 ${ms(p50)}, P95 ${ms(p95)}, P99 ${ms(p99)}, longest ${ms(longest)}` : "Latency: no token yet");
    const width = this.surface.width, zero = this.surface.height - 18, top = 14, w = width / n, at = this.board.focus;
    g.fillStyle = theme.line; g.fillRect(0, zero, width, 1);
    for (let i = 0; i < n; i++) {
      const v = bins[i] / most * (zero - top);
      g.fillStyle = at && at.kind === "bin" && at.bin === i ? theme.fg : OKABE[4];
      if (bins[i]) g.fillRect(i * w, zero - Math.max(v, 1.5), w - 1, Math.max(v, 1.5));
    }
    // the tokens that are pointed at, each bin's as a tick below the axis as wide as their share of them
    const often = Math.max(1, ...marks.values());
    g.fillStyle = theme.fg;
    for (const [bin, count] of marks) g.fillRect(bin * w, zero + 1, Math.max(2, w - 1), 1 + 4 * count / often);
    if (total) {
      g.strokeStyle = theme.fg; g.globalAlpha = 0.75; g.lineWidth = 1.5; g.beginPath(); g.moveTo(0, zero);
      for (let i = 0, sum = 0; i < n; i++) { sum += bins[i]; g.lineTo((i + 1) * w, zero - sum / total * (zero - top)); }
      g.stroke(); g.globalAlpha = 1;
      this.percentiles(g, f, width, zero, top);
    }
    g.fillStyle = theme.mute; g.textAlign = "center";
    for (let i = 0; i <= 5; i++) { g.textAlign = i === 0 ? "left" : i === 5 ? "right" : "center"; g.fillText(short(f.ms_end * i / 5) + (i === 5 ? " ms" : ""), width * i / 5, zero + 12); }
    g.textAlign = "left";
    put(this.sub, total ? `ms a token, ${many(f.decoded, "token")}` : "ms a token");
    setLegend(this.legend, [["tokens", OKABE[4]], ["share below", theme.fg, "line"], [`first token ${ms(f.ttft)}`, "transparent", "none"],
      ...(f.prompt_rate ? [[`prompt ${whole(f.prompt_rate)} tokens/s`, "transparent", "none"]] : [])]);
    put(this.readout, at && at.kind === "bin" ? this.describe(f, at.bin, total) : words);
  }
  percentiles(g, f, width, zero, top) {
    const dash = [[], [5, 3], [2, 2]];
    f.ms.slice(0, 3).forEach((v, i) => {
      const x = Math.min(v / f.ms_end, 1) * width, text = `${["P50", "P95", "P99"][i]} ${num(v)}`, room = g.measureText(text).width + 8;
      g.strokeStyle = MARK; g.lineWidth = 1.5; g.setLineDash(dash[i]); g.beginPath(); g.moveTo(x, top - 8); g.lineTo(x, zero); g.stroke(); g.setLineDash([]);
      const left = x + room > width ? x - room + 4 : x + 4, y = top + i * 14;
      g.fillStyle = this.board.theme.card; g.globalAlpha = 0.8; g.fillRect(left - 2, y - 7, room - 3, 14); g.globalAlpha = 1;
      g.fillStyle = this.board.theme.fg; g.fillText(text, left, y);
    });
  }
  table(f) {
    const total = f.a.bins.reduce((a, b) => a + b, 0), rows = [...["P50", "P95", "P99", "longest"].map((name, i) => [name, ms(f.ms[i]), "", ""]),
      ["to first token", ms(f.ttft), "", ""], ["prompt", f.prompt_rate ? `${whole(f.prompt_rate)} tokens/s` : "–", "", ""]];
    let below = 0;
    f.a.bins.forEach((count, i) => {
      below += count;
      if (count) rows.push([this.range(f, i), "", whole(count), percent(below / total)]);
    });
    return {caption: `Latency of ${many(total, "decoded token")}; prompts are not among them`, head: ["", "time", "tokens", "share up to here"], rows};
  }
}
