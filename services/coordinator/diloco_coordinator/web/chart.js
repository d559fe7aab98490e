/* A line chart in SVG: validation loss over the run's steps. */

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 560, HEIGHT = 250, LEFT = 44, RIGHT = 46, TOP = 12, BOTTOM = 30;

function element(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

/* Round numbers that cover low to high in about `wanted` steps. */
export function ticks(low, high, wanted) {
  const rough = (high - low || 1) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const first = Math.ceil(low / step);
  const found = [];
  // Of numbers so large that one more makes no difference there would be no end.
  for (let i = 0; i <= wanted + 1 && (first + i) * step <= high + step * 1e-9; i += 1) found.push((first + i) * step);
  return found;
}

/* Given to Math.max one by one, a browser's stack would bound how many there may be. */
const least = (numbers) => numbers.reduce((a, b) => Math.min(a, b));
const most = (numbers) => numbers.reduce((a, b) => Math.max(a, b));

/* `points`: [{x, y}] by x. Replaces what `parent` shows; says the same in words. */
export function lineChart(parent, points, { xLabel, describe }) {
  const svg = element("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": describe });
  const xs = points.map((p) => p.x), ys = points.map((p) => p.y);
  const xLow = 0, xHigh = Math.max(most(xs), 1);
  const spread = most(ys) - least(ys) || Math.abs(ys[0]) || 1;
  const yLow = least(ys) - 0.06 * spread, yHigh = most(ys) + 0.06 * spread;
  const x = (v) => LEFT + ((v - xLow) / (xHigh - xLow)) * (WIDTH - LEFT - RIGHT);
  const y = (v) => HEIGHT - BOTTOM - ((v - yLow) / (yHigh - yLow)) * (HEIGHT - TOP - BOTTOM);
  const yTicks = ticks(yLow, yHigh, 5);
  const fine = yTicks.length > 1 ? Math.max(0, -Math.floor(Math.log10(yTicks[1] - yTicks[0]) + 1e-9)) : 2;
  const digits = Math.min(fine, 20); // a browser writes no more than a hundred
  for (const v of yTicks) {
    svg.append(element("line", { class: "axis", x1: LEFT, x2: WIDTH - RIGHT, y1: y(v), y2: y(v) }));
    svg.append(element("text", { x: LEFT - 7, y: y(v) + 4, "text-anchor": "end" }, v.toFixed(digits)));
  }
  for (const v of ticks(xLow, xHigh, 5)) {
    svg.append(element("text", { x: x(v), y: HEIGHT - BOTTOM + 17, "text-anchor": "middle" }, v.toLocaleString("en")));
  }
  svg.append(element("text", { x: WIDTH - RIGHT + 4, y: HEIGHT - BOTTOM + 17 }, xLabel));
  const path = points.map((p, i) => `${i ? "L" : "M"}${x(p.x).toFixed(1)} ${y(p.y).toFixed(1)}`).join("");
  svg.append(element("path", { class: "curve", d: path }));
  // Dots only while they can be told apart.
  for (const p of points.length <= 60 ? points : points.slice(-1)) {
    const dot = element("circle", { cx: x(p.x), cy: y(p.y), r: 3 });
    dot.append(element("title", {}, `${p.x.toLocaleString("en")} steps: ${p.y.toFixed(4)}`));
    svg.append(dot);
  }
  const last = points[points.length - 1];
  svg.append(element("text", { class: "last", x: x(last.x) + 7, y: y(last.y) - 6 }, last.y.toFixed(3)));
  parent.replaceChildren(svg);
}
