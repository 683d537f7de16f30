"""The script of a page: the slider of a timeline and the zoom of a flame graph. Nothing that it
shows is missing without it but the positions other than the peak."""

SCRIPT = """
const made = (name, css, ...inside) => {
  const one = document.createElement(name);
  if (css) one.className = css;
  one.append(...inside);
  return one;
};
const mb = (bytes) => (bytes / 1e6).toLocaleString("en-US",
  { minimumFractionDigits: 1, maximumFractionDigits: 1 });

// A timeline: the reader chooses one of the stops, which are all positions of all programs.
for (const figure of document.querySelectorAll("figure.timeline")) {
  const programs = JSON.parse(figure.querySelector("script").textContent);
  const label = figure.querySelector(".cursor");
  const slider = label.querySelector("input");
  const readout = figure.querySelector(".readout");
  const areas = [...figure.querySelectorAll(".area")];
  // Until the reader chooses, each program shows its own peak.
  const lines = areas.map((area) => area.appendChild(made("span", "here")));
  for (const line of lines) line.hidden = true;
  const shares = programs.flatMap((one) => one.positions.map((at) => at / one.last));
  const stops = [...new Set(shares)].sort((a, b) => a - b);
  const indexAt = (one, share) => {
    let found = 0;
    one.positions.forEach((at, index) => { if (at / one.last <= share + 1e-9) found = index; });
    return found;
  };
  const swatch = (colour) => {
    const one = made("span", "swatch");
    one.style.background = colour;
    return one;
  };
  const told = (one, at) => {
    const total = one.bytes[at].reduce((a, b) => a + b, 0);
    const where = ` at position ${one.positions[at]}${at === one.peak ? ", the peak" : ""}`;
    const head = made("p", "", made("b", "", `${mb(total)} MB`), where);
    if (one.key) head.prepend(made("b", `letter ${one.key}`, one.key), " ");
    const rows = one.largest[at].map(([which, bytes]) => {
      const [role, shape, source] = one.buffers[which];
      const [name, colour] = one.roles[role];
      return made("li", "", made("span", "number", `${mb(bytes)} MB`),
        made("span", "", swatch(colour), name), made("span", "code", shape),
        made("span", "quiet code", source));
    });
    const roles = one.roles.map(([name, colour], role) => [name, colour, one.bytes[at][role]])
      .filter(([, , size]) => size && size >= 0.002 * total).sort((a, b) => b[2] - a[2])
      .map(([name, colour, size]) => made("span", "", swatch(colour), `${name} ${mb(size)}`));
    return made("div", "", head, made("p", "roles", ...roles), made("ol", "", ...rows));
  };
  const show = () => {
    const share = stops[slider.value];
    for (const line of lines) {
      line.hidden = false;
      line.style.left = `${100 * share}%`;
    }
    readout.replaceChildren(...programs.map((one) => told(one, indexAt(one, share))));
    slider.setAttribute("aria-valuetext", readout.querySelector("p").textContent);
  };
  const nearest = (share) => stops.reduce((best, stop, index) =>
    Math.abs(stop - share) < Math.abs(stops[best] - share) ? index : best, 0);
  for (const area of areas) {
    const point = (event) => {
      const box = area.getBoundingClientRect();
      slider.value = nearest((event.clientX - box.left) / box.width);
      show();
    };
    area.addEventListener("pointermove", point);
    area.addEventListener("pointerdown", point);
  }
  slider.max = stops.length - 1;
  slider.value = nearest(programs[0].positions[programs[0].peak] / programs[0].last);
  slider.setAttribute("aria-valuetext", readout.querySelector("p").textContent);
  slider.addEventListener("input", show);
  label.hidden = false;
}

// A flame graph: its calls are in the order of a tree, each with its level.
for (const figure of document.querySelectorAll("figure.flame")) {
  const frames = figure.querySelector(".frames");
  const items = [...frames.children];
  const said = figure.querySelector(".said");
  const level = (item) => Number(item.getAttribute("aria-level"));
  const number = (item, name) => Number(item.style.getPropertyValue(name));
  const isShown = (item) => item && !item.hidden;
  const parent = (item) => items.slice(0, items.indexOf(item)).reverse()
    .find((other) => level(other) < level(item));
  const child = (item) => items.slice(items.indexOf(item) + 1)
    .find((other) => isShown(other) && parent(other) === item);
  const beside = (item, step) => {
    const row = items.filter((other) => level(other) === level(item) && isShown(other));
    return row[row.indexOf(item) + step];
  };
  let top = items[0];
  const focus = (item) => {
    if (!item) return;
    for (const other of items) other.tabIndex = other === item ? 0 : -1;
    item.focus({ preventScroll: true });
    item.scrollIntoView({ block: "nearest" });
  };
  const tell = (item) => { said.textContent = item.title; };
  const zoom = (item) => {
    top = item;
    const [x, w] = [number(item, "--x"), number(item, "--w")];
    frames.style.setProperty("--zx", x);
    frames.style.setProperty("--zw", w);
    for (const other of items) {
      const [left, width] = [number(other, "--x"), number(other, "--w")];
      other.hidden = left + width < x + 1e-4 || left > x + w - 1e-4;
      const isAbove = !other.hidden && level(other) < level(item);
      other.classList.toggle("above", isAbove);
    }
    focus(item);
    tell(item);
  };
  const keys = {
    ArrowUp: parent,
    ArrowLeft: (item) => beside(item, -1),
    ArrowRight: (item) => beside(item, 1),
    ArrowDown: child,
    Home: () => items[0],
  };
  frames.addEventListener("keydown", (event) => {
    const item = event.target;
    if (event.key === "Enter" || event.key === " ") zoom(item);
    else if (event.key === "Escape") zoom(parent(top) || top);
    else if (keys[event.key]) focus(keys[event.key](item));
    else return;
    event.preventDefault();
  });
  frames.addEventListener("click", (event) => {
    const item = event.target.closest("[role=treeitem]");
    if (item) zoom(item === top ? parent(item) || item : item);
  });
  for (const name of ["focusin", "pointerover"]) {
    frames.addEventListener(name, (event) => {
      const item = event.target.closest("[role=treeitem]");
      if (item) tell(item);
    });
  }
}
"""
