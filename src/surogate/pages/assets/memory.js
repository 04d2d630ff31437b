// The memory of a device over the ops of a step.

const PHASES = { forward: "c1", backward: "c2", recompute: "c3", reference: "c4", update: "c4" };

function memory(figure, M) {
  let grey = 0, other = 0;
  for (const area of M.areas) {
    area.colour = area.fixed ? `g${grey++ % 4}` : `m${other++ % 8}`;
    const y = [];
    area.y.forEach(([from, v], i) => { // pairs of an op and the bytes from there on
      const to = i + 1 < area.y.length ? area.y[i + 1][0] : M.op.length;
      for (let at = from; at < to; at++) y[at] = v;
    });
    area.y = y;
  }
  for (const mark of document.querySelectorAll("[data-area]")) {
    const area = M.areas.find((a) => a.name === mark.dataset.area);
    mark.style.setProperty("--k", area ? `var(--${area.colour})` : "transparent");
  }
  const n = M.op.length;
  if (!n) return;
  const all = M.op.map((_, i) => M.areas.reduce((sum, a) => sum + a.y[i], 0));
  const still = M.areas.filter((a) => a.fixed).reduce((sum, a) => sum + a.y[0], 0);
  let changing = still > 0.8 * all[M.peak]; // what does not change would hide the rest
  const set = (value) => { changing = value; draw(); };
  const field = radios("show", "area", [[false, "everything"], [true, "what changes"]], () => changing, set);
  figure.before($("div", { className: "controls" }, field));
  const me = { redraw: draw, figure };

  function draw() {
    const areas = M.areas.filter((a) => !changing || !a.fixed), total = new Array(n).fill(0);
    const sums = areas.map((a) => a.y.map((v, i) => (total[i] += v)));
    const top = total[M.peak], limit = M.limit - (changing ? still : 0);
    const high = limit < top * 1.6 ? Math.max(limit, top) * 1.09 : top * 1.15;
    const readout = $("output", { className: "readout" });
    const bound = limit < high ? keyOf("bad", `the device has ${size(M.limit)}`, "line dotted") : null;
    const keys = [bound, ...areas.map((a) => keyOf(a.colour, a.name)).reverse()].filter(Boolean);
    const plot = frame(figure, keys, readout);
    const opText = (i) => `op ${M.op[i].toLocaleString("en")}, ${M.phases[M.phase[i]]}: ${M.kinds[M.kind[i]]}`
      + (M.block[i] >= 0 ? ` of block ${M.block[i]}` : "");
    const tell = (u) => {
      const i = u.cursor.idx;
      if (i == null || u.cursor.left < 0) return void (readout.textContent = "");
      const most = areas.map((a) => [a.y[i], a.name]).sort((a, b) => b[0] - a[0]).slice(0, 3);
      readout.textContent = `${opText(i)} · ${size(total[i])} · most: ${most.map(([v, name]) => `${name} ${size(v)}`).join(", ")}`;
    };
    const decorate = (u) => {
      const { ctx, bbox } = u, r = devicePixelRatio, right = bbox.left + bbox.width, foot = bbox.top + bbox.height;
      ctx.save();
      for (let i = 0; i < n; i++) { // along the bottom: the phase of each op
        const a = Math.max(bbox.left, u.valToPos(M.op[i], "x", true));
        const b = Math.min(right, u.valToPos(i + 1 < n ? M.op[i + 1] : M.op[i] + 1, "x", true));
        ctx.fillStyle = css(PHASES[M.phases[M.phase[i]]] || "quiet");
        if (b > a) ctx.fillRect(a, foot - 5 * r, b - a + 0.5, 5 * r);
      }
      const x = u.valToPos(M.op[M.peak] + 0.5, "x", true), y = u.valToPos(top, "y", true);
      if (x >= bbox.left && x <= right) {
        ctx.font = `600 ${12 * r}px ${getComputedStyle(document.body).fontFamily}`;
        ctx.strokeStyle = ctx.fillStyle = css("ink");
        ctx.lineWidth = 1.5 * r;
        ctx.beginPath(); ctx.arc(x, y, 4 * r, 0, 7); ctx.stroke();
        const text = `peak ${size(top)}${changing ? ` + ${size(still)}` : ""}`, wide = ctx.measureText(text).width / 2;
        ctx.textAlign = "center";
        ctx.fillText(text, Math.min(Math.max(x, bbox.left + wide), right - wide), y - 10 * r);
      }
      if (limit < high) {
        const y = u.valToPos(limit, "y", true);
        ctx.setLineDash([5 * r, 4 * r]);
        ctx.lineWidth = 1.5 * r;
        ctx.strokeStyle = css("bad");
        ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(right, y); ctx.stroke();
      }
      ctx.restore();
    };
    const fill = (a) => ({
      stroke: css("card"), width: 0.5, fill: css(a.colour), paths: uPlot.paths.stepped({ align: 1 }), points: { show: false },
    });
    const incrs = [1, 2, 5, 10, 20, 50, 100, 200, 500].flatMap((k) => [10, 20, 30, 40].map((p) => k * 2 ** p)).sort((a, b) => a - b);
    const u = new uPlot({
      width: plot.clientWidth, height: Math.min(380, Math.max(260, innerHeight * 0.45)), legend: { show: false },
      series: [{}, ...[...areas].reverse().map(fill)], // the highest sum first, so that the lower ones are drawn on it
      scales: { x: { time: false, range: (u, lo, hi) => [lo, Math.max(hi, lo + 1)] }, y: { range: [0, high] } },
      axes: [
        axis({ size: 28, space: 70, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000],
          values: (u, v) => v.map((x) => (x === 0 ? "op 0" : x.toLocaleString("en"))) }),
        axis({ size: innerWidth < 720 ? 58 : 70, incrs, values: (u, v) => v.map((y) => (y ? size(y) : "0")) }),
      ],
      cursor: { points: { show: false }, drag: { x: true, y: false } },
      hooks: { draw: [decorate], setCursor: [tell] },
    }, [M.op, ...[...sums].reverse()], plot);
    me.u?.destroy();
    me.u = u;
    steer(plot, u);
    const phases = M.phases.map((phase) => keyOf(PHASES[phase] || "quiet", phase, "flat"));
    figure.append($("div", { className: "made keys" }, "along the bottom:", ...phases));
    asTable(figure, ["op", "in all", ...areas.map((a) => a.name)], () => {
      const every = Math.max(1, Math.ceil(n / 40));
      const rows = M.op.map((_, i) => [opText(i), size(total[i]), ...areas.map((a) => size(a.y[i]))]);
      return rows.filter((_, i) => i % every === 0 || i === M.peak || i === n - 1);
    });
  }
  live.push(me);
  draw();
}
