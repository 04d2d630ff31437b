// Draws all charts, and gives the page its controls.

function controls(section) {
  const of = (title, name, options) => radios(title, name, options, () => view[name], (value) => {
    view[name] = value;
    for (const chart of live) if (chart.linked) chart.redraw();
  });
  section.querySelector(".asks").after($("div", { className: "controls" },
    of("along", "x", [["step", "steps"], ["tokens", "tokens"], ["time", "time"]]),
    of("smoothing", "smooth", [[0, "raw"], [1, "light"], [2, "usual"], [3, "strong"]]),
    of("height", "log", [[false, "linear"], [true, "log"]])));
}

async function copy(button) {
  const code = button.previousElementSibling;
  try {
    await navigator.clipboard.writeText(code.textContent);
  } catch { // a page opened as a file may not write there
    getSelection().selectAllChildren(code);
    document.execCommand("copy");
  }
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

// The theme: that of the system, until the reader chooses; then remembered where the browser allows a file to.
function theme(paint) {
  const names = ["auto", "light", "dark"], signs = { auto: "◐ auto", light: "☀ light", dark: "☾ dark" };
  const button = document.getElementById("theme");
  const remembered = () => { try { return localStorage.getItem("surogate-theme"); } catch { return null; } };
  const keep = (name) => { try { localStorage.setItem("surogate-theme", name); } catch { /* nothing is kept */ } };
  let chosen;
  const apply = (name) => {
    chosen = names.includes(name) ? name : "auto";
    document.documentElement.dataset.theme = chosen;
    button.textContent = signs[chosen];
    button.setAttribute("aria-label", `Colours: ${chosen}`);
  };
  button.hidden = false;
  button.onclick = () => { apply(names[(names.indexOf(chosen) + 1) % 3]); keep(chosen); paint(); };
  apply(location.search.slice(1) || remembered()); // report.html?dark, for links and pictures
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
}

// The link of the section that is read.
function follow() {
  const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
  const seen = new Set();
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) entry.isIntersecting ? seen.add(entry.target.id) : seen.delete(entry.target.id);
    const first = [...links.keys()].find((id) => seen.has(id));
    for (const [id, link] of links) link.classList.toggle("here", id === first);
  }, { rootMargin: "-15% 0px -60% 0px" });
  for (const id of links.keys()) {
    const section = document.getElementById(id);
    if (section) watch.observe(section);
  }
}

theme(() => live.forEach((chart) => chart.redraw()));
for (const figure of document.querySelectorAll("[data-chart]")) {
  const spec = D.charts[figure.dataset.chart];
  if (spec && spec.lines.length) series(figure, spec);
}
for (const figure of document.querySelectorAll("[data-memory]")) memory(figure, D.memory);
if (document.getElementById("loss")) controls(document.getElementById("loss"));
if ((D.numerics || []).length) numerics(document.getElementById("numerics-map"), D.numerics);
for (const button of document.querySelectorAll("[data-copy]")) {
  button.hidden = false;
  button.onclick = () => copy(button);
}
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  requestAnimationFrame(() => live.forEach((chart) => chart.redraw()));
});
follow();
document.documentElement.dataset.drawn = Math.round(performance.now()); // milliseconds until all was drawn
