// Start-up, the theme, copy buttons and print. Text from the trace only ever goes through textContent.
function element(tag, className = "", text = "") {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text) node.textContent = text;
  return node;
}

function themeButton() {
  const button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  // Some browsers refuse storage to a page opened from a file.
  try { chosen = localStorage.getItem("advisor-theme"); } catch { /* the system's theme, then */ }
  const dark = () => (chosen ? chosen === "dark" : system.matches);
  function apply() {
    document.documentElement.style.colorScheme = chosen ?? "";
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", dark() ? "Use the light theme" : "Use the dark theme");
  }
  button.addEventListener("click", () => {
    chosen = dark() ? "light" : "dark";
    try { localStorage.setItem("advisor-theme", chosen); } catch { /* for this visit only */ }
    apply();
  });
  system.addEventListener("change", apply);
  button.hidden = false;
  apply();
}

function copyButtons() {
  for (const button of document.querySelectorAll(".copy")) {
    const code = button.parentElement.querySelector("code");
    button.hidden = false;
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(code.textContent);
        button.textContent = "Copied";
      } catch {
        getSelection().selectAllChildren(code);
        button.textContent = "Selected";
      }
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }
}

themeButton();
copyButtons();
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});

const data = JSON.parse(document.getElementById("kernel-data").textContent);
if (data.rows.length > 0) {
  const setFamily = (name) => { table.setFamily(name); plot.family(name); };
  const plot = rooflinePlot(data, (row) => { table.reveal(row); plot.pick(row); }, setFamily);
  const table = kernelTable(data, (row) => plot.pick(row), setFamily);
}
