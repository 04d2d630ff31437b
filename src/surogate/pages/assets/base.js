"use strict";
// Data of the page, elements, numbers as text, and what all charts share.

const D = JSON.parse(document.getElementById("page-data").textContent);

const $ = (tag, props = {}, ...children) => {
  const el = Object.assign(document.createElement(tag), props);
  el.append(...children.filter((child) => child != null)); // text is text: append never reads it as HTML
  return el;
};
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const alpha = (colour, a) => colour + Math.round(a * 255).toString(16).padStart(2, "0");

const number = (v) => {
  if (v == null) return "none";
  const a = Math.abs(v);
  for (const [unit, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"]]) if (a >= unit) return (v / unit).toPrecision(3) + suffix;
  if (a >= 1e4) return (v / 1e3).toPrecision(3) + "k";
  if (a !== 0 && a < 1e-2) return v.toExponential(1).replace("e-0", "e-").replace(".0e", "e");
  return String(+v.toPrecision(4));
};
const size = (n) => {
  for (const [unit, suffix] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"]])
    if (n >= unit) return +(n / unit).toPrecision(3) + " " + suffix;
  return (n / 1024).toFixed(0) + " KiB";
};
const clock = (s) =>
  s < 120 ? `${+s.toPrecision(3)} s` : s < 7200 ? `${+(s / 60).toPrecision(3)} min` : `${+(s / 3600).toPrecision(3)} h`;
const along = {
  step: (v) => `step ${Math.round(v).toLocaleString("en")}`,
  tokens: (v) => `${number(v)} tokens`,
  time: clock,
};

const view = { x: "step", smooth: 2, log: false }; // what the controls choose
const live = []; // all charts: {redraw, u, linked}

const font = () => `12px ${getComputedStyle(document.body).fontFamily}`;
const axis = (extra) => ({
  stroke: css("quiet"), grid: { stroke: css("grid"), width: 1 }, ticks: { show: false }, font: font(), ...extra,
});

const keyOf = (colour, name, form = "") => {
  const key = $("span", { className: "key-button" }, $("i", { className: `key ${form}` }), name);
  key.style.setProperty("--k", `var(--${colour})`);
  return key;
};

// The plot of a figure with its keys above; what was drawn before is removed.
function frame(figure, keys, readout) {
  figure.querySelectorAll(".made").forEach((el) => el.remove());
  const plot = $("div", { className: "made plot", tabIndex: 0 });
  const says = figure.querySelector(".says").textContent;
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", `${says} Arrow keys move through the values; plus and minus zoom, Escape shows all.`);
  const speak = (how) => readout.setAttribute("aria-live", how);
  speak("off"); // only the chart that has the focus is read out, not those that follow it
  plot.addEventListener("focus", () => speak("polite"));
  plot.addEventListener("blur", () => speak("off"));
  figure.append($("div", { className: "made keys" }, ...keys, readout), plot);
  return plot;
}

// Keys and fingers on a plot.
function steer(plot, u) {
  plot.addEventListener("keydown", (e) => {
    const X = u.data[0], last = X.length - 1, { min, max } = u.scales.x;
    if (last < 0) return;
    const shown = X.filter((x) => x >= min && x <= max).length;
    const step = Math.max(1, Math.round(shown / (e.shiftKey ? 12 : 200)));
    const at = u.cursor.idx ?? 0;
    const to = { ArrowLeft: at - step, ArrowRight: at + step, Home: 0, End: last }[e.key];
    if (to !== undefined) {
      const i = Math.max(0, Math.min(last, to));
      u.setCursor({ left: u.valToPos(X[i], "x"), top: u.over.clientHeight / 2 }, true, true); // the other charts too
    } else if (e.key === "+" || e.key === "-") {
      const half = ((max - min) / 2) * (e.key === "+" ? 0.5 : 2);
      u.setScale("x", { min: Math.max(X[0], X[at] - half), max: Math.min(X[last], X[at] + half) });
    } else if (e.key === "Escape") u.setScale("x", { min: X[0], max: X[last] });
    else return;
    e.preventDefault();
  });
  u.over.addEventListener("touchmove", (e) => { // a finger reads values; the page still scrolls up and down
    const box = u.over.getBoundingClientRect(), touch = e.touches[0];
    u.setCursor({ left: touch.clientX - box.left, top: touch.clientY - box.top }, true, true);
  }, { passive: true });
}

// The values of a plot as a table, made when it is opened.
function asTable(figure, head, rows) {
  const details = $("details", { className: "made as-table" }, $("summary", { textContent: "As a table" }));
  details.ontoggle = () => {
    if (details.querySelector("table")) return;
    const row = (cells, tag, props = {}) => $("tr", {}, ...cells.map((c) => $(tag, { textContent: c, ...props })));
    const table = $("table", {}, row(head, "th", { scope: "col" }), ...rows().map((r) => row(r, "td")));
    const scroll = $("div", { className: "scroll", tabIndex: 0 }, table);
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", "Values of the chart");
    details.append(scroll);
  };
  figure.append(details);
}

function radios(title, name, options, now, set) {
  const field = $("fieldset", {}, $("legend", { textContent: title }));
  for (const [value, text] of options) {
    const input = $("input", { type: "radio", name, checked: now() === value });
    input.onchange = () => set(value);
    field.append($("label", {}, input, $("span", { textContent: text })));
  }
  return field;
}
