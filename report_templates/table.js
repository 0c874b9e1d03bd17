// The kernel table: sort, search, filters, opened rows, and more rows on demand.
function kernelTable(data, onPick, onFamily) {
  const PAGE = 50;
  const [FAMILY, COLOUR, VALUES, TEXTS, DETAILS] = [1, 2, 3, 4, 5];
  const [NAME, OP, MODULE, PHASE, TIME, SHARE, BOUND, EFFICIENCY, FLAGS] = [0, 1, 2, 3, 5, 6, 10, 11, 12];
  const table = document.getElementById("kernels");
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const form = document.getElementById("filters");
  const search = document.getElementById("search");
  const family = document.getElementById("family");
  const picks = [document.getElementById("bound"), document.getElementById("phase")];
  const more = document.getElementById("more");
  const matches = document.getElementById("found");
  const haystack = data.rows.map((row) =>
    [data.names[row[0]], row[TEXTS][NAME], row[VALUES][OP], row[VALUES][MODULE]].join("\n").toLowerCase());
  const largest = Math.max(...data.rows.map((row) => row[VALUES][SHARE] ?? 0), 1e-9);
  let sorting = { column: TIME, down: true };
  let limit = PAGE;
  let picked = -1;
  const opened = new Set();

  function compare(a, b) {
    const [x, y] = [data.rows[a][VALUES][sorting.column], data.rows[b][VALUES][sorting.column]];
    if (x === null || y === null) return (x === null) - (y === null) || a - b;
    const order = typeof x === "number" ? x - y : x < y ? -1 : Number(x > y);
    return (sorting.down ? -order : order) || a - b;
  }

  function found() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const keep = (row, i) =>
      words.every((word) => haystack[i].includes(word)) &&
      (family.value === "" || row[FAMILY] === family.value) &&
      picks.every((pick) => pick.value === "" || row[TEXTS][Number(pick.dataset.column)] === pick.value);
    return data.rows.flatMap((row, i) => (keep(row, i) ? [i] : [])).sort(compare);
  }

  function cell(row, column) {
    const text = row[TEXTS][column];
    const td = element("td", data.columns[column].kind);
    if (column === BOUND) {
      const kind = ["memory", "compute", "communication", "copy"].includes(text) ? text : "unknown";
      td.append(element("span", `bound b-${kind}`, text));
    } else if (column === FLAGS) {
      for (const flag of text.split(", ").filter(Boolean)) {
        const mark = element("span", "flag", flag);
        mark.title = data.flags[flag] ?? "";
        td.append(mark);
      }
    } else {
      td.textContent = text;
    }
    if ([OP, MODULE, PHASE, BOUND].includes(column)) td.title = row[VALUES][column] ?? "";
    const bar = column === SHARE ? row[VALUES][column] / largest : column === EFFICIENCY ? row[VALUES][column] : null;
    if (bar !== null) {
      td.classList.add("share-bar");
      td.style.setProperty("--share", Math.max(0, Math.min(1, bar)));
    }
    return td;
  }

  function line(index) {
    const row = data.rows[index];
    const tr = element("tr", index === picked ? "picked" : "");
    tr.dataset.row = index;
    const head = element("th");
    head.scope = "row";
    head.title = data.names[row[0]];
    const button = element("button", "name", row[TEXTS][NAME]);
    button.type = "button";
    button.setAttribute("aria-expanded", String(opened.has(index)));
    button.addEventListener("click", () => {
      if (!opened.delete(index)) opened.add(index);
      draw();
      body.querySelector(`tr[data-row="${index}"] button`)?.focus({ preventScroll: true });
    });
    head.append(element("span", `key c${row[COLOUR]}`), button);
    tr.append(head, ...data.columns.slice(1).map((_, i) => cell(row, i + 1)));
    return opened.has(index) ? [tr, detail(row)] : [tr];
  }

  function detail(row) {
    const list = element("dl");
    const facts = [["Family", row[FAMILY]], ...data.details.map((label, i) => [label, row[DETAILS][i]])];
    for (const [label, text] of facts) {
      const pair = element("div");
      pair.append(element("dt", "", label), element("dd", "", text));
      list.append(pair);
    }
    const td = element("td");
    td.colSpan = data.columns.length;
    td.append(element("p", "full", data.names[row[0]]), list);
    const tr = element("tr", "opened");
    tr.append(td);
    return tr;
  }

  function draw() {
    const order = found();
    body.replaceChildren(...order.slice(0, limit).flatMap(line));
    const time = order.reduce((sum, i) => sum + (data.rows[i][VALUES][SHARE] ?? 0), 0);
    matches.textContent = `${order.length.toLocaleString("en")} of ${data.rows.length.toLocaleString("en")} groups, ${(100 * time).toFixed(1)}% of the time`;
    more.hidden = order.length <= limit;
    more.textContent = `Show ${Math.min(order.length - limit, 200)} more`;
  }

  function sortBy(column) {
    const same = sorting.column === column;
    sorting = { column, down: same ? !sorting.down : data.columns[column].kind === "number" };
    for (const head of heads) head.removeAttribute("aria-sort");
    heads[column].setAttribute("aria-sort", sorting.down ? "descending" : "ascending");
    draw();
  }

  function offer(select, values) {
    for (const value of [...new Set(values)].sort()) select.append(new Option(value, value));
  }

  heads.forEach((head, column) => {
    const button = element("button", "", head.textContent);
    button.type = "button";
    button.addEventListener("click", () => sortBy(column));
    head.replaceChildren(button);
  });
  for (const pick of picks) offer(pick, data.rows.map((row) => row[TEXTS][Number(pick.dataset.column)]));
  offer(family, data.rows.map((row) => row[FAMILY]));

  function clear() {
    search.value = "";
    for (const pick of picks) pick.value = "";
    onFamily("");
  }

  const refresh = () => { limit = PAGE; draw(); };
  search.addEventListener("input", refresh);
  for (const pick of picks) pick.addEventListener("change", refresh);
  family.addEventListener("change", () => onFamily(family.value));
  form.addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("clear").addEventListener("click", clear);
  more.addEventListener("click", () => { limit += 200; draw(); });
  body.addEventListener("pointerover", (event) => {
    const row = event.target.closest("tr[data-row]");
    if (row) onPick(Number(row.dataset.row));
  });
  body.addEventListener("pointerleave", () => onPick(picked));
  form.hidden = false;
  draw();

  return {
    setFamily(name) { family.value = name; refresh(); },
    reveal(index) {
      if (!found().includes(index)) clear();
      picked = index;
      limit = Math.max(limit, found().indexOf(index) + 1);
      draw();
      const row = body.querySelector(`tr[data-row="${index}"]`);
      row.scrollIntoView({ block: "center" });
      row.querySelector("button").focus({ preventScroll: true });
    },
  };
}
