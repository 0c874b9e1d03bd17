// The roofline plot: tooltips, keyboard, families, and the way from a dot to its row.
function rooflinePlot(data, onPick, onFamily) {
  const layer = document.querySelector(".dots");
  if (!layer) return { pick() {}, family() {} };
  const tip = document.getElementById("tip");
  const figure = layer.closest("figure");
  const dots = [...layer.children];
  const byRow = new Map(dots.map((dot) => [Number(dot.dataset.row), dot]));
  // Arrow keys walk from left to right, whatever the order of drawing.
  const walk = [...dots].sort((a, b) => a.cx.baseVal.value - b.cx.baseVal.value);

  function describe(row) {
    const [name, family, , , texts, details] = data.rows[row];
    const label = Object.fromEntries(data.columns.map((column, i) => [column.label, texts[i]]));
    const detail = Object.fromEntries(data.details.map((key, i) => [key, details[i]]));
    return [data.names[name], [
      ["Op", label.Op], ["Module", label.Module], ["Phase", `${label.Phase}, ${family}`],
      ["Time", `${label["Time, ms"]} ms, ${label.Share}`],
      ["Intensity", `${label["FLOP/byte"]} FLOP/byte`],
      ["Achieved", `${detail.Achieved}, ${detail.Bandwidth}`],
      ["Efficiency", `${label.Efficiency}, ${label.Bound}-bound`],
    ]];
  }

  function show(dot) {
    const [name, facts] = describe(Number(dot.dataset.row));
    const heading = element("p", "name", name.length > 160 ? `${name.slice(0, 160)}…` : name);
    const list = element("dl");
    for (const [key, text] of facts) if (text !== "—") list.append(element("dt", "", key), element("dd", "", text));
    tip.replaceChildren(heading, list);
    tip.hidden = false;
    const frame = figure.getBoundingClientRect();
    const at = dot.getBoundingClientRect();
    const left = at.right - frame.left + 10;
    const fits = left + tip.offsetWidth <= frame.width;
    tip.style.left = `${Math.max(0, fits ? left : at.left - frame.left - tip.offsetWidth - 10)}px`;
    tip.style.top = `${Math.max(0, Math.min(at.top - frame.top, frame.height - tip.offsetHeight))}px`;
  }

  const hide = () => { tip.hidden = true; };

  function rove(dot) {
    for (const other of dots) other.setAttribute("tabindex", other === dot ? "0" : "-1");
  }

  for (const dot of dots) {
    const title = dot.querySelector("title");
    dot.setAttribute("role", "button");
    dot.setAttribute("aria-label", title.textContent);
    title.remove();
    dot.addEventListener("pointerenter", () => show(dot));
    dot.addEventListener("pointerleave", hide);
    dot.addEventListener("focus", () => { rove(dot); show(dot); });
    dot.addEventListener("blur", hide);
    dot.addEventListener("click", () => onPick(Number(dot.dataset.row)));
  }
  rove(walk[0]);

  layer.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const here = walk.indexOf(event.target);
    if (step && here >= 0) {
      event.preventDefault();
      walk[(here + step + walk.length) % walk.length].focus();
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      onPick(Number(event.target.dataset.row));
    } else if (event.key === "Escape") {
      hide();
    }
  });

  const chips = [...document.querySelectorAll("#families button")];
  function family(name) {
    layer.classList.toggle("sifted", name !== "");
    for (const dot of dots) dot.classList.toggle("kept", dot.dataset.family === name);
    for (const chip of chips) chip.setAttribute("aria-pressed", String(chip.dataset.family === name));
  }
  for (const chip of chips) {
    chip.addEventListener("click", () => onFamily(chip.getAttribute("aria-pressed") === "true" ? "" : chip.dataset.family));
  }

  function pick(row) {
    for (const dot of dots) dot.classList.remove("picked");
    byRow.get(row)?.classList.add("picked");
  }
  return { pick, family };
}
