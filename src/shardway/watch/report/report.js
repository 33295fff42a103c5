(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const figures = new Map(data.figures.map((figure) => [figure.name, figure]));
  const maps = new Map(data.maps.map((map) => [map.name, map]));
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);

  const number = (value) => {
    const size = Math.abs(value);
    if (size >= 1e5 && size < 1e13) {
      const power = Math.min(4, Math.floor(Math.log10(size) / 3));
      return Number((value / 1000 ** power).toPrecision(3)) + ["", "k", "M", "B", "T"][power];
    }
    if (size !== 0 && (size >= 1e13 || size < 1e-4)) return value.toExponential(2);
    return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
  };

  function clock(seconds) {
    const whole = Math.round(seconds);
    const two = (part) => String(part).padStart(2, "0");
    return `${Math.floor(whole / 3600)}:${two(Math.floor(whole / 60) % 60)}:${two(whole % 60)}`;
  }

  function timeAt(place) {
    const { times, places } = data.axis;
    let at = 1;
    while (at < places.length - 1 && places[at] < place) at += 1;
    const width = places[at] - places[at - 1];
    const part = width > 0 ? (place - places[at - 1]) / width : 0;
    return times[at - 1] + part * (times[at] - times[at - 1]);
  }

  function nearest(xs, place) {
    let low = 0;
    let high = xs.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < place) low = middle + 1;
      else high = middle;
    }
    return low > 0 && place - xs[low - 1] < xs[low] - place ? low - 1 : low;
  }

  // Lines of text for what is under the pointer
  function ofFigure(name, place) {
    const figure = figures.get(name);
    if (!figure) return [];
    const lines = [];
    for (const trace of figure.traces) {
      const at = nearest(trace.x, place);
      if (trace.y[at] === null || trace.y[at] === undefined || Math.abs(trace.x[at] - place) > 0.03) continue;
      if (!lines.length) lines.push(`step ${trace.step[at].toLocaleString("en")}`);
      lines.push(`${trace.name}: ${number(trace.y[at])}`);
    }
    return lines;
  }

  function cell(map, row, bin) {
    map.bytes = map.bytes || Uint8Array.from(atob(map.cells), (char) => char.charCodeAt(0));
    const level = map.bytes[row * map.bins + bin];
    return level === 255 ? null : (level / 254) * map.top;
  }

  function ofMap(name, place, height, overRows) {
    const map = maps.get(name);
    if (!map) return [];
    const bin = Math.min(map.bins - 1, Math.floor(place * map.bins));
    const row = Math.min(map.rows.length - 1, Math.max(0, Math.floor(height * map.rows.length)));
    const value = overRows ? null : cell(map, row, bin);
    if (!overRows) return [`${map.rows[row]}: ${value === null ? "no sample" : `${number(value)} ${map.unit}`}`];
    const known = map.rows.map((_, at) => [cell(map, at, bin), at]).filter(([each]) => each !== null);
    if (!known.length) return ["no sample"];
    known.sort((one, other) => one[0] - other[0]);
    const mean = known.reduce((sum, [each]) => sum + each, 0) / known.length;
    const [least, most] = [known[0], known[known.length - 1]];
    return [
      `mean ${number(mean)} ${map.unit}`,
      `lowest ${number(least[0])} (${map.rows[least[1]]})`,
      `highest ${number(most[0])} (${map.rows[most[1]]})`,
    ];
  }

  function point(event) {
    const plot = event.target.closest(".plot");
    if (!plot) return hide();
    const box = plot.getBoundingClientRect();
    const place = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const height = (event.clientY - box.top) / box.height;
    const time = timeAt(place);
    const { figure, map, strip } = plot.dataset;
    const words = figure ? ofFigure(figure, place) : map ? ofMap(map, place, height, false) : [];
    const lines = [
      data.unit === "steps" ? "" : `${clock(time - data.axis.times[0])} after the start`, ...words, ...(strip ? ofMap(strip, place, 0, true) : []),
    ];
    const named = event.target.closest("[title]");
    if (named) lines.push(named.title);
    tip.replaceChildren(...lines.filter(Boolean).map((line) => {
      const row = document.createElement("div");
      row.textContent = line;
      return row;
    }));
    document.documentElement.style.setProperty("--at", `${100 * place}%`);
    document.documentElement.classList.add("pointing");
    tip.hidden = false;
    const left = event.clientX + 14 + tip.offsetWidth > window.innerWidth ? event.clientX - 14 - tip.offsetWidth
      : event.clientX + 14;
    tip.style.left = `${Math.max(4, left)}px`;
    tip.style.top = `${Math.max(4, Math.min(window.innerHeight - tip.offsetHeight - 4, event.clientY + 14))}px`;
  }

  function hide() {
    tip.hidden = true;
    document.documentElement.classList.remove("pointing");
  }

  document.addEventListener("pointermove", point);
  document.addEventListener("pointerdown", point);
  document.addEventListener("pointerleave", hide);
  document.addEventListener("scroll", hide, { passive: true });

  // The logarithmic scale: paths, grid and labels of one figure again
  function draw(figure, isLog) {
    const lane = document.getElementById(`lane-${figure.name}`);
    const finite = figure.traces.flatMap((trace) => trace.y).filter((y) => y !== null && (!isLog || y > 0));
    if (!finite.length) return;
    const to = isLog ? Math.log10 : (value) => value;
    let [low, high] = figure.range;
    if (isLog) {
      low = Math.log10(finite.reduce((least, each) => Math.min(least, each)));
      high = Math.log10(finite.reduce((most, each) => Math.max(most, each)));
      const room = 0.04 * (high - low) || 0.05;
      low -= room;
      high += room;
    }
    const height = (value) => Math.round(1000 - 1000 * (to(value) - low) / (high - low));
    const paths = [];
    for (const trace of figure.traces) {
      let line = "";
      let dots = "";
      let down = false;
      trace.y.forEach((y, at) => {
        if (y === null || (isLog && y <= 0)) { down = false; return; }
        const place = `${(1000 * trace.x[at]).toFixed(1)} ${height(y)}`;
        line += down ? `L${place}` : `M${place}h.01`;
        dots += `M${place}h.01`;
        down = true;
      });
      paths.push([trace.faint ? "curve faint" : "curve", trace.colour, line]);
      if (trace.dotted) paths.push(["dots", trace.colour, dots]);
    }
    lane.querySelector(".curves").replaceChildren(...paths.map(([kind, colour, line]) => path(kind, line, colour)));
    const ticks = isLog ? powers(low, high) : linear(low, high);
    lane.querySelector("g.lines").replaceChildren(
      ...ticks.map((tick) => path("grid", `M0 ${height(tick)}H1000`)));
    lane.querySelector(".labels").replaceChildren(...ticks.map((tick) => {
      const label = document.createElement("span");
      label.style.bottom = `${100 * (to(tick) - low) / (high - low)}%`;
      label.textContent = number(tick);
      return label;
    }));
  }

  function path(kind, line, colour) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", "path");
    made.setAttribute("class", kind);
    made.setAttribute("d", line);
    if (colour) made.style.stroke = `var(--${colour})`;
    return made;
  }

  function powers(low, high) {
    const parts = high - low > 2.5 ? [1] : high - low > 0.8 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8];
    const ticks = [];
    for (let power = Math.floor(low); power <= Math.ceil(high); power += 1) {
      for (const part of parts) {
        const value = part * 10 ** power;
        if (Math.log10(value) >= low && Math.log10(value) <= high) ticks.push(value);
      }
    }
    const stride = Math.ceil(ticks.length / 6);
    return ticks.filter((_, at) => at % stride === 0);
  }

  function linear(low, high) {
    const power = 10 ** Math.floor(Math.log10((high - low) / 4));
    const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => (high - low) / each <= 4) || 10 * power;
    const ticks = [];
    for (let at = Math.ceil(low / step - 1e-9); at * step <= high; at += 1) ticks.push(at * step);
    return ticks;
  }

  for (const button of document.querySelectorAll("button[data-log]")) {
    button.addEventListener("click", () => {
      const isLog = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(isLog));
      draw(figures.get(button.dataset.log), isLog);
    });
  }

  // Paper shows all that is folded
  window.addEventListener("beforeprint", () => {
    for (const folded of document.querySelectorAll("details.print:not([open])")) folded.open = true;
  });
})();
