(() => {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg";
  const charts = JSON.parse(document.getElementById("data").textContent);

  function element(name, attributes) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }

  // the point of a line that is nearest to a place on the x axis
  function nearest(points, x) {
    let low = 0, high = points.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (points[middle][1] < x) low = middle + 1; else high = middle;
    }
    return low > 0 && x - points[low - 1][1] < points[low][1] - x ? low - 1 : low;
  }

  // values under the pointer, or under the arrow keys, in place of the last ones
  function watch(figure) {
    const {lines, unit} = charts[Number(figure.dataset.chart)];
    const svg = figure.querySelector("svg"), cursor = figure.querySelector(".cursor");
    const output = figure.querySelector("output"), last = output.textContent;
    const steps = [...new Set(lines.flatMap((line) => line.points.map((point) => point[0])))].sort((a, b) => a - b);
    let place = steps.length - 1;

    function shown(line) {
      const hidden = line.style.match(/of-(\d+)/), box = hidden && document.getElementById(`run-${hidden[1]}`);
      return !box || box.checked;
    }

    function show(x) {
      const found = lines.filter(shown).map((line) => [line, line.points[nearest(line.points, x)]]);
      if (!found.length) return;
      const at = found.reduce((a, b) => (Math.abs(b[1][1] - x) < Math.abs(a[1][1] - x) ? b : a))[1];
      const here = found.filter(([, point]) => point[0] === at[0]);
      place = steps.indexOf(at[0]);
      cursor.replaceChildren(element("path", {d: `M${at[1]} 10V166`}));
      output.replaceChildren(`step ${Math.round(at[0])}`);
      for (const [line, point] of here) {
        cursor.append(element("circle", {cx: point[1], cy: point[2], r: 3.5, class: line.style}));
        const value = document.createElement("span");
        value.className = line.style;
        value.textContent = (line.style.startsWith("phase") ? `${line.name} ` : "") + point[3] + unit;
        output.append(value);
      }
    }

    function leave() {
      cursor.replaceChildren();
      output.textContent = last;
    }

    function xOf(step) {
      for (const line of lines) for (const point of line.points) if (point[0] === step) return point[1];
    }

    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect();
      show((event.clientX - box.left) / box.width * svg.viewBox.baseVal.width);
    });
    svg.addEventListener("pointerleave", leave);
    svg.tabIndex = 0;
    svg.addEventListener("blur", leave);
    svg.addEventListener("focus", () => svg.matches(":focus-visible") && show(xOf(steps[place])));
    svg.addEventListener("keydown", (event) => {
      const by = {ArrowLeft: -1, ArrowRight: 1, Home: -steps.length, End: steps.length}[event.key];
      if (by === undefined) return;
      event.preventDefault();
      show(xOf(steps[Math.min(steps.length - 1, Math.max(0, place + by))]));
    });
  }

  // completions of one step at a time, the last at first
  function filter(select) {
    const before = document.getElementById("before"), behind = document.getElementById("behind");
    const cards = document.querySelectorAll(".card");

    function apply() {
      for (const card of cards) card.hidden = select.value !== "" && card.dataset.step !== select.value;
      before.disabled = select.selectedIndex <= 1;
      behind.disabled = select.selectedIndex === select.options.length - 1;
    }

    function move(by) {
      select.selectedIndex += by;
      apply();
    }

    select.closest(".filter").hidden = false;
    select.selectedIndex = select.options.length - 1;
    select.addEventListener("change", apply);
    before.addEventListener("click", () => move(-1));
    behind.addEventListener("click", () => move(1));
    apply();
  }

  document.querySelectorAll(".chart").forEach(watch);
  const select = document.getElementById("step");
  if (select) filter(select);
})();
