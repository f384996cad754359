// The rest of what moves: legend, sorting, zoom, theme, download. `chart.js` stands above.

(() => {
  const byId = (id) => document.getElementById(id);
  const data = JSON.parse(byId("curves").textContent);
  const state = { off: new Set(), loss: 2, near: false };
  const charts = [...document.querySelectorAll(".chart")].map((figure) => new Chart(figure, data, state));
  const draw = () => charts.forEach((chart) => chart.draw());

  // legend
  const buttons = data.series.map((series, place) => {
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.recipe = series.name;
    button.disabled = !series.points.length;
    if (button.disabled) button.title = "no loss curve";
    const swatch = element("svg", { width: 30, height: 12, viewBox: "-15 -6 30 12", class: series.colour, "aria-hidden": "true" });
    element("path", { class: "line-path", d: "M-14 0H14", "stroke-dasharray": DASHES[series.dash] }, swatch);
    element("path", { class: "mark", d: MARKS[series.mark] }, swatch);
    button.append(swatch, series.name);
    button.addEventListener("click", () => {
      if (!state.off.delete(place)) state.off.add(place);
      refresh();
    });
    const light = (on) => charts.forEach(({ svg }) => {
      svg.classList.toggle("dimmed", on && !state.off.has(place));
      svg.querySelectorAll(".series")[place].classList.toggle("lit", on);
    });
    button.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") light(true); });
    button.addEventListener("pointerleave", () => light(false));
    const item = document.createElement("li");
    item.append(button);
    byId("legend").append(item);
    return button;
  });

  function refresh() {
    buttons.forEach((button, place) => button.setAttribute("aria-pressed", String(!state.off.has(place))));
    draw();
  }
  byId("show-all").addEventListener("click", () => { state.off.clear(); refresh(); });
  byId("show-none").addEventListener("click", () => { data.series.forEach((_, place) => state.off.add(place)); refresh(); });

  // training loss or held-out loss, where both are known
  const losses = byId("losses");
  const known = (column) => data.series.some((series) => series.points.some((point) => point[column] !== null));
  losses.hidden = !(known(2) && known(3));
  if (!known(2) && known(3)) state.loss = 3;
  losses.addEventListener("click", (event) => {
    if (!event.target.dataset.loss) return;
    state.loss = Number(event.target.dataset.loss);
    for (const button of losses.children) button.setAttribute("aria-pressed", String(button === event.target));
    draw();
  });

  byId("near").firstElementChild.addEventListener("change", (event) => { state.near = event.target.checked; draw(); });

  // a new width needs a new drawing
  let width = 0;
  new ResizeObserver(() => {
    const now = charts[0].canvas.clientWidth;
    if (now !== width) { width = now; draw(); }
  }).observe(charts[0].canvas);
  refresh();

  // sorting: nothing goes last, whichever way
  const body = byId("results").tBodies[0];
  const heads = [...byId("results").querySelectorAll("thead th")];
  heads.forEach((head, place) => head.firstElementChild.addEventListener("click", () => {
    const first = head.firstElementChild.dataset.first;
    const other = first === "ascending" ? "descending" : "ascending";
    const way = head.getAttribute("aria-sort") === first ? other : first;
    heads.forEach((each) => each.setAttribute("aria-sort", each === head ? way : "none"));
    const sign = way === "ascending" ? 1 : -1;
    const value = (row) => row.cells[place].dataset.value;
    const compare = (a, b) => {
      if (value(a) === "" || value(b) === "") return (value(a) === "") - (value(b) === "");
      return sign * (place ? Number(value(a)) - Number(value(b)) : value(a).localeCompare(value(b)));
    };
    body.append(...[...body.rows].sort(compare));
  }));

  // bars: words for each part, and the second scale
  document.addEventListener("pointerover", (event) => {
    const said = event.target.dataset && event.target.dataset.said;
    if (!said) return;
    const box = event.target.getBoundingClientRect();
    const cut = said.lastIndexOf(": ");
    tip.show(said.slice(0, cut), [said.slice(cut + 2)], event.clientX, box.top);
    event.target.addEventListener("pointerleave", (left) => { if (left.pointerType !== "touch") tip.hide(); }, { once: true });
  });
  const away = () => { charts.forEach((chart) => chart.leave()); tip.hide(); };
  addEventListener("scroll", () => {
    if (!charts.some((chart) => chart.at)) tip.hide();
    charts.forEach((chart) => chart.stay());
  }, { passive: true });
  addEventListener("pointerdown", (event) => { if (!event.target.closest(".canvas, [data-said]")) away(); });
  const bars = byId("breakdown");
  if (bars && bars.classList.contains("zooms")) {
    const near = Number(bars.style.getPropertyValue("--near"));
    for (const line of bars.querySelectorAll(".line")) {
      const long = [...line.querySelectorAll(".bar")].map((bar) =>
        [...bar.children].reduce((sum, part) => sum + Number(part.style.getPropertyValue("--long")), 0));
      line.classList.toggle("cut", Math.max(0, ...long) > near);
    }
    byId("zoom").hidden = false;
    byId("zoom").firstElementChild.addEventListener("change", (event) => {
      bars.classList.toggle("near-scale", event.target.checked);
      bars.style.setProperty("--most", `var(${event.target.checked ? "--near" : "--all"})`);
    });
  }
})();
