"use strict";
// Loss curves: one Chart a figure. It is drawn anew for every width, so that text keeps its size on a phone.

const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "7 4", "2 4", "9 3 2 3"];
const MARKS = [
  "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0Z", "M-3 -3H3V3H-3Z", "M0 -4L3.8 3H-3.8Z",
  "M0 -4.4L4.4 0L0 4.4L-4.4 0Z", "M0 4L3.8 -3H-3.8Z", "M-3.2 -3.2L3.2 3.2M-3.2 3.2L3.2 -3.2",
];

function element(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (parent) parent.append(made);
  return made;
}

function words(text, attributes, parent) {
  element("text", attributes, parent).textContent = text;
}

/** Round numbers in [low, high], about `count` of them: multiples of 1, 2 or 5 times a power of ten. */
function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const found = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place++) {
    found.push(Number((place * step).toPrecision(12)));
  }
  return found;
}

/** Powers of ten in [low, high], with 2 and 5 times them where there is room; linear ones within one power. */
function logTicks(low, high, count) {
  for (const factors of [[1, 2, 5], [1, 3], [1]]) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const factor of factors) {
        const tick = Number((factor * 10 ** power).toPrecision(12));
        if (tick >= low && tick <= high) found.push(tick);
      }
    }
    if (found.length <= count + 1 && found.length >= 2) return found;
    if (found.length < 2) return linearTicks(low, high, count);
    if (factors.length === 1) return found.filter((_, place) => place % Math.ceil(found.length / count) === 0);
  }
}

function plainTick(value) {
  return Number(value.toPrecision(6)).toLocaleString("en-US", { maximumFractionDigits: 6 });
}

function bytesTick(value) {
  for (const [factor, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (value >= factor) return `${plainTick(value / factor)} ${unit}`;
  }
  return value ? `${plainTick(value)} B` : "0";
}

class Chart {
  constructor(figure, data, state) {
    Object.assign(this, { figure, data, state, x: Number(figure.dataset.x), shown: [], at: null });
    this.canvas = figure.querySelector(".canvas");
    const box = figure.querySelector("input");
    box.checked = figure.dataset.log === "true";
    box.addEventListener("change", () => { figure.dataset.log = box.checked; this.draw(); });
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    // A finger that is lifted leaves too, and what it pointed at should stay to be read.
    this.canvas.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") this.leave(); });
    this.canvas.addEventListener("focusout", () => this.leave());
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  get log() { return this.figure.dataset.log === "true"; }

  /** The points that can be drawn: [x, y, index] for each series that is switched on. */
  visible() {
    return this.data.series.map((series, place) => this.state.off.has(place) ? [] : series.points
      .map((point, index) => [point[this.x], point[this.state.loss], index])
      .filter(([x, y]) => x !== null && y !== null && (!this.log || x > 0)));
  }

  domain(lines) {
    const all = lines.flat();
    if (!all.length) return null;
    const low = (place) => all.reduce((least, point) => Math.min(least, point[place]), Infinity);
    const high = (place) => all.reduce((most, point) => Math.max(most, point[place]), -Infinity);
    let [left, right, bottom, top] = [this.log ? low(0) : Math.min(0, low(0)), high(0), low(1), high(1)];
    // All start alike: what rises to twice the start has diverged, and must not flatten the others.
    const starts = lines.filter((line) => line.length).map((line) => line[0][1]).sort((a, b) => a - b);
    const usual = starts[Math.floor((starts.length - 1) / 2)];
    const sane = starts.filter((start) => start <= 2 * Math.abs(usual));
    if (top > 2 * Math.abs(usual)) top = Math.max(usual + 0.25 * (usual - bottom), ...sane);
    const target = this.data.target;
    if (target !== null) [bottom, top] = [Math.min(bottom, target), Math.max(top, target)];
    if (right <= left) right = this.log ? left * 10 : left + 1;
    if (this.log && left === low(0) && lines.flat().length === 1) left /= 10;
    if (this.state.near) top = bottom + (top - bottom) / 6;
    const room = (top - bottom) * 0.05 || Math.abs(top) * 0.05 || 1;
    return { left, right, bottom: bottom - 2 * room, top: top + room }; // below: room for the name of the target
  }

  draw() {
    this.leave();
    const { figure, data } = this;
    const width = Math.max(this.canvas.clientWidth, 240);
    const height = Math.round(Math.min(Math.max(width * 0.68, 230), 360));
    const edge = { left: 44, right: 14, top: 22, bottom: 44 };
    const lines = this.visible();
    const domain = this.domain(lines);
    const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0 });
    svg.setAttribute("aria-label", `${figure.dataset.title}, ${data.series.length} recipes. Arrow keys walk along the points.`);
    this.shown = lines.map(() => []);
    if (!domain) {
      const some = data.series.some((series) => series.points.length);
      words(some ? "No recipe to draw is switched on." : "No recipe has a loss curve.", { x: width / 2, y: height / 2, "text-anchor": "middle", class: "nothing" }, svg);
    }
    const scale = domain && this.scale(domain, width, height, edge);
    if (domain) this.axes(svg, domain, scale, width, height, edge);
    const clip = `clip-${figure.id}`;
    element("rect", { x: edge.left - 6, y: edge.top - 6, width: width - edge.left + 2, height: height - edge.top - edge.bottom + 12 }, element("clipPath", { id: clip }, svg));
    const group = element("g", { "clip-path": `url(#${clip})` }, svg);
    data.series.forEach((series, place) => {
      const made = element("g", { class: `series ${series.colour}` }, group);
      made.dataset.recipe = series.name;
      made.dataset.off = this.state.off.has(place);
      if (domain && lines[place].length) this.line(made, series, place, lines[place], scale, edge.top - 6);
      if (domain && lines[place].length && this.x === 0) this.decisions(made, series, domain, scale, height - edge.bottom, edge.top);
    });
    if (domain && data.target !== null) {
      words(`target ${data.targetSaid}`, { class: "target-label", x: edge.left + 6, y: scale.y(data.target) + 14 }, svg);
    }
    this.canvas.replaceChildren(svg);
    this.svg = svg;
  }

  scale(domain, width, height, edge) {
    const turn = this.log ? Math.log10 : (value) => value;
    const [left, right] = [turn(domain.left), turn(domain.right)];
    return {
      x: (value) => edge.left + (turn(value) - left) / (right - left) * (width - edge.left - edge.right),
      y: (value) => edge.top + (domain.top - value) / (domain.top - domain.bottom) * (height - edge.top - edge.bottom),
    };
  }

  axes(svg, domain, scale, width, height, edge) {
    const floor = height - edge.bottom;
    for (const tick of linearTicks(domain.bottom, domain.top, 5)) {
      const y = scale.y(tick);
      element("line", { class: "grid", x1: edge.left, x2: width - edge.right, y1: y, y2: y }, svg);
      words(plainTick(tick), { x: edge.left - 8, y: y + 4, "text-anchor": "end" }, svg);
    }
    const room = Math.floor((width - edge.left) / 70);
    const ticks = this.log ? logTicks(domain.left, domain.right, room) : linearTicks(domain.left, domain.right, room);
    for (const tick of ticks) {
      const x = scale.x(tick);
      element("line", { class: "base", x1: x, x2: x, y1: floor, y2: floor + 4 }, svg);
      words(this.x === 1 ? bytesTick(tick) : `${plainTick(tick)} s`, { x, y: floor + 18, "text-anchor": "middle", class: "tick" }, svg);
    }
    element("line", { class: "base", x1: edge.left, x2: width - edge.right, y1: floor, y2: floor }, svg);
    words(figureAxis(this.figure, this.log), { x: width - edge.right, y: floor + 37, "text-anchor": "end" }, svg);
    words("loss", { x: edge.left - 8, y: 10, "text-anchor": "end" }, svg);
    if (this.data.target !== null) {
      const y = scale.y(this.data.target);
      element("line", { class: "target", x1: edge.left, x2: width - edge.right, y1: y, y2: y }, svg);
    }
  }

  decisions(group, series, domain, scale, floor, ceiling) {
    for (const at of series.marks || []) {
      const x = scale.x(Math.max(at, domain.left));
      if (at <= domain.right) element("line", { class: "decision", x1: x, x2: x, y1: ceiling, y2: floor }, group);
    }
  }

  line(group, series, place, points, scale, ceiling) {
    const all = points.map(([x, y, index]) => ({ x: scale.x(x), y: scale.y(y), index, place }));
    const spots = all.filter(({ y }) => y >= ceiling);
    this.shown[place] = spots;
    const path = all.map(({ x, y }, order) => `${order ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
    if (all.length > 1) element("path", { class: "line-path", d: path, "stroke-dasharray": DASHES[series.dash] }, group);
    // Marks stand about 70 pixels apart, at other places for each series, and at the end.
    let next = (spots.length ? spots[0].x : 0) + 25 + (place * 29) % 70;
    spots.forEach(({ x, y }, order) => {
      if (x < next && order < spots.length - 1) return;
      next = x + 70;
      element("path", { class: "mark", d: MARKS[series.mark], transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` }, group);
    });
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const ratio = this.svg.viewBox.baseVal.width / box.width;
    const [x, y] = [(event.clientX - box.left) * ratio, (event.clientY - box.top) * ratio];
    let best = null;
    for (const spot of this.shown.flat()) {
      const far = (spot.x - x) ** 2 + (spot.y - y) ** 2;
      if (!best || far < best.far) best = { ...spot, far };
    }
    if (best && best.far < 60 ** 2) this.show(best); else this.leave();
  }

  key(event) {
    const step = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
    if (event.key === "Escape") this.leave();
    const places = this.shown.map((spots, place) => spots.length ? place : -1).filter((place) => place >= 0);
    if (!step || !places.length) return;
    event.preventDefault();
    const now = this.at || { place: places[0], order: step[0] < 0 ? 0 : -1 };
    const place = places[(places.indexOf(now.place) + step[1] + places.length) % places.length];
    const spots = this.shown[place];
    const order = Math.min(Math.max(now.order + step[0], 0), spots.length - 1);
    this.show(spots[order]);
  }

  show(spot) {
    this.leave();
    const series = this.data.series[spot.place];
    this.at = { place: spot.place, order: this.shown[spot.place].findIndex((other) => other.index === spot.index) };
    const group = this.svg.querySelectorAll(".series")[spot.place];
    this.svg.classList.add("dimmed");
    group.classList.add("lit");
    element("circle", { class: "focus-dot", cx: spot.x, cy: spot.y, r: 5 }, group);
    const [step, time, size, loss, held] = series.said[spot.index];
    const losses = series.points[spot.index][3] === null ? `loss ${loss}` : `loss ${loss}, held-out ${held}`;
    const box = this.svg.getBoundingClientRect();
    const ratio = box.width / this.svg.viewBox.baseVal.width;
    tip.show(series.name, [losses, `${time}, ${size}`, step], box.left + spot.x * ratio, box.top + spot.y * ratio);
  }

  /** The page moved under the tooltip: put it back to its point. */
  stay() {
    if (this.at) this.show(this.shown[this.at.place][this.at.order]);
  }

  leave() {
    if (!this.at) return;
    this.at = null;
    this.svg.classList.remove("dimmed");
    this.svg.querySelectorAll(".lit").forEach((group) => group.classList.remove("lit"));
    this.svg.querySelectorAll(".focus-dot").forEach((dot) => dot.remove());
    tip.hide();
  }
}

function figureAxis(figure, log) {
  return figure.dataset.axis + (log ? ", logarithmic" : "");
}

/** The one tooltip of the page; it keeps inside the window, and text stays text. */
const tip = {
  show(name, lines, x, y) {
    const box = document.getElementById("tip");
    const head = document.createElement("b");
    head.textContent = name;
    box.replaceChildren(head, ...lines.flatMap((line) => [line, document.createElement("br")]).slice(0, -1));
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const left = Math.min(Math.max(x - width / 2, 6), document.documentElement.clientWidth - width - 6);
    const top = y - height - 14 < 6 ? y + 18 : y - height - 14;
    box.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
  },
  hide() { document.getElementById("tip").hidden = true; },
};
