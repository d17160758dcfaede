// Colours, numbers and words. Cividis for shares, Okabe-Ito for kinds, JupyterLab's own colours for everything else.
const OKABE = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999"];
const STAGES = [["experts", "#0072B2"], ["attention", "#56B4E9"], ["router", "#E69F00"], ["dispatch", "#CC79A7"], ["I/O wait", "#D55E00"], ["head", "#009E73"], ["other", "#999999"]];
const FAULT = "#E69F00", HIT = "#009E73", EVICTED = "#CC79A7", MEMORY = "#56B4E9", MARK = "#D55E00", DEVICE = "#CC79A7";
const STOPS = [[0, 34, 78], [18, 53, 112], [59, 73, 108], [87, 93, 109], [112, 113, 115], [138, 134, 120],
  [165, 156, 116], [195, 179, 105], [225, 204, 85], [254, 232, 56]];
const CIVIDIS = Array.from({length: 64}, (_, i) => {
  const x = i / 63 * (STOPS.length - 1), a = Math.min(x | 0, STOPS.length - 2), t = x - a;
  return "rgb(" + STOPS[a].map((v, c) => Math.round(v + (STOPS[a + 1][c] - v) * t)).join(",") + ")";
});

function readTheme(el) {
  const css = getComputedStyle(el);
  const get = (name) => css.getPropertyValue(name).trim();
  return {fg: get("--cl-fg"), mute: get("--cl-mute"), line: get("--cl-line"), empty: get("--cl-empty"),
    card: get("--cl-card"), font: get("--cl-font") || "sans-serif"};
}

const rgba = (hex, alpha) => {
  const n = parseInt(hex.slice(1), 16);
  return `rgba(${n >> 16},${n >> 8 & 255},${n & 255},${alpha})`;
};

// three significant digits, never an exponent
function num(v) {
  if (v === null || v === undefined || !isFinite(v)) return "–";
  const a = Math.abs(v);
  const digits = a >= 100 || a === 0 ? 0 : a >= 10 ? 1 : a >= 1 ? 2 : 3;
  return v.toLocaleString("en-US", {minimumFractionDigits: digits, maximumFractionDigits: digits});
}
const plain = (v) => (Number.isInteger(v) ? whole(v) : short(v));
const short = (v) => String(Number(v.toPrecision(3)));
const whole = (v) => (v === null || v === undefined ? "–" : Math.round(v).toLocaleString("en-US"));
const compact = (v) => (v < 10000 ? String(v) : v < 1e6 ? `${Math.round(v / 1000)}k` : `${(v / 1e6).toFixed(1)}M`);
const percent = (v) => (v === null || v === undefined ? "–" : (100 * v).toFixed(v > 0.9995 ? 0 : 1) + " %");
const ms = (v) => (v === null || v === undefined ? "–" : v < 1 ? num(v * 1000) + " µs" : v < 1000 ? num(v) + " ms" : num(v / 1000) + " s");
const many = (n, one, more) => `${whole(n)} ${n === 1 ? one : more || one + "s"}`;

function bytes(v) {
  if (v === null || v === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let i = 0;
  while (v >= 1024 && i < 4) { v /= 1024; i++; }
  return (i === 0 ? whole(v) : num(v)) + " " + units[i];
}

function h(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "class") node.className = value;
    else if (name === "style") node.style.cssText = value;
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}
const put = (node, text) => { if (node.textContent !== text) node.textContent = text; };
