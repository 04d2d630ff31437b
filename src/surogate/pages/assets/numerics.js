// The figures of tensors: a row for each kind of tensor, a column for each block.

const SHARES = ["range", "clipped", "lost", "error"];

function numerics(root, reports) {
  const columns = reports[0].columns;
  const choose = (label, names, from) => {
    const select = $("select", {}, ...names.map((text, i) => $("option", { value: i, textContent: text, selected: i === from })));
    select.onchange = draw;
    return [$("label", { className: "choose" }, label, select), select];
  };
  const holder = $("div", { className: "scroll", tabIndex: 0 });
  holder.setAttribute("role", "region");
  holder.setAttribute("aria-label", "Figures of tensors");
  const [a, column] = choose("figure", columns, Math.max(0, columns.indexOf("range")));
  const [b, when] = choose("step", reports.map((report) => report.step), reports.length - 1);
  root.replaceChildren($("div", { className: "controls" }, a, b), holder);

  function draw() {
    const report = reports[+when.value], name = columns[+column.value], at = report.columns.indexOf(name), rows = {};
    for (const [tensor, values] of Object.entries(report.tensors)) {
      const block = +(tensor.match(/^layers\.(\d+)\./)?.[1] ?? 0);
      (rows[tensor.replace(/^layers\.\d+\./, "")] ??= [])[block] = values[at];
    }
    const all = Object.values(rows).flat().filter((v) => v != null), high = Math.max(...all), low = Math.min(...all);
    const blocks = Math.max(...Object.values(rows).map((row) => row.length));
    const share = (v) => {
      if (high === low) return 0;
      if (name === "amax" && low > 0) return Math.log(v / low) / Math.log(high / low);
      return (v - Math.min(0, low)) / (high - Math.min(0, low));
    };
    const text = (v) => (v == null ? "" : SHARES.includes(name) ? `${+(v * 100).toPrecision(3)} %` : number(v));
    const over = (v) => (name === "range" && v > 1.005) || (name === "clipped" && v > 0.001);
    const heads = [...Array(blocks).keys()].map((i) => $("th", { textContent: `block ${i}`, scope: "col" }));
    const table = $("table", { className: "heat" },
      $("caption", { textContent: `${name} at step ${report.step}` + (all.length ? `, from ${text(low)} to ${text(high)}` : "") }),
      $("tr", {}, $("th", { textContent: "tensor", scope: "col" }), ...heads));
    for (const [tensor, values] of Object.entries(rows)) {
      const row = $("tr", {}, $("th", { textContent: tensor, scope: "row" }));
      for (let i = 0; i < blocks; i++) {
        const v = values[i], cell = $("td", { textContent: text(v), title: `${tensor}, block ${i}: ${name} ${text(v)}` });
        if (v != null) cell.style.setProperty("--v", share(v).toFixed(3));
        if (over(v)) cell.classList.add("over");
        row.append(cell);
      }
      table.append(row);
    }
    holder.replaceChildren(table);
  }
  draw();
}
