// Charts of series over steps, tokens or time.

const SMOOTH = [0, 0.006, 0.02, 0.05]; // half of a window, as a share of the curve
const LEAST_SMOOTHED = 30;

// A running median, then a running mean, over centred windows that shrink towards the ends.
function smoothed(values, strength) {
  const half = Math.round(values.length * SMOOTH[strength]);
  if (half < 1) return values;
  const median = (w) => w.sort((a, b) => a - b)[w.length >> 1];
  const mean = (w) => w.reduce((a, b) => a + b, 0) / w.length;
  let out = values;
  for (const [h, middle] of [[half, median], [Math.ceil(half / 3), mean]]) {
    const from = out;
    out = from.map((v, i) => {
      if (values[i] == null) return null; // a step without a number stays a gap
      const r = Math.min(h, i, from.length - 1 - i);
      const window = from.slice(i - r, i + r + 1).filter((x) => x != null);
      return window.length ? middle(window) : null;
    });
  }
  return out;
}

// Ticks of a logarithmic axis: 1, 2, 5 of each decade; equal steps where the axis is short.
function ticks(lo, hi) {
  const found = [];
  if (hi / lo >= 8) {
    for (let p = 10 ** Math.floor(Math.log10(lo)); p <= hi; p *= 10)
      found.push(...[p, 2 * p, 5 * p].filter((v) => v >= lo && v <= hi));
  } else {
    const power = 10 ** Math.floor(Math.log10((hi - lo) / 4));
    const step = [1, 2, 5, 10].map((k) => k * power).find((s) => (hi - lo) / s <= 6);
    for (let v = Math.ceil(lo / step) * step; v <= hi; v += step) found.push(+v.toPrecision(6));
  }
  return found;
}

// The heights that a chart shows: a few steps far above the others do not flatten the rest.
function heights(spec, values, lo, hi, log, zoomed) {
  if (!zoomed) {
    const sorted = [...values].sort((a, b) => a - b);
    lo = sorted[0] ?? 0;
    hi = sorted[sorted.length - 1] ?? 1;
    const usual = sorted[Math.floor(sorted.length * 0.985)];
    if (!log && hi - lo > 3 * (usual - lo) && usual > lo) hi = lo + 1.6 * (usual - lo);
  }
  if (lo == null || hi == null) [lo, hi] = [0, 1];
  if (spec.zero) lo = Math.min(0, lo);
  for (const ref of spec.refs || [])
    if (ref.y < hi * 2.5) [lo, hi] = [Math.min(lo, ref.y), Math.max(hi, ref.y)];
  if (log) return [lo / 1.08, hi * 1.08];
  const pad = (hi - lo) * 0.06 || Math.abs(hi) * 0.1 || 1;
  return [spec.zero && lo >= 0 ? 0 : lo - pad, hi + pad];
}

function series(figure, spec) {
  const hidden = new Set(), unit = spec.unit ? ` ${spec.unit}` : "";
  const me = { linked: true, redraw: draw, figure };

  function draw() {
    const X = (line) => D.runs[line.run].x[line.x][view.x];
    const smooth = (line) => line.smooth && view.smooth && line.y.length >= LEAST_SMOOTHED;
    const data = uPlot.join(spec.lines.map((line) => {
      const parts = [X(line), line.y];
      if (smooth(line)) parts.push(smoothed(line.y, view.smooth));
      if (line.lo) parts.push(line.lo, line.hi);
      return parts;
    }));
    const list = [{}], bands = [], main = [];
    spec.lines.forEach((line, i) => {
      const colour = css(line.colour), dash = line.dash || line.run ? [6, 4] : undefined;
      const base = { show: !hidden.has(i), spanGaps: line.x !== "train", points: { show: false } };
      const few = line.y.length < 60 && line.x !== "train", alone = line.y.length === 1;
      const points = few || alone ? { show: true, size: 7, fill: css("card"), stroke: colour, width: 2 } : { show: false };
      const raw = smooth(line) ? { stroke: alpha(colour, 0.32), width: 1 } : { stroke: colour, width: 2, dash };
      main.push(list.push({ ...base, ...raw, points }) - 1);
      if (smooth(line)) main[i] = list.push({ ...base, stroke: colour, width: 2.2, dash }) - 1;
      if (line.lo) { // the upper edge is drawn too: a single high step stays visible
        list.push({ ...base, stroke: "transparent", width: 0 }, { ...base, stroke: alpha(colour, 0.3), width: 1 });
        bands.push({ series: [list.length - 1, list.length - 2], fill: alpha(colour, 0.14) });
      }
    });
    const shown = spec.lines.filter((_, i) => !hidden.has(i));
    const values = shown.flatMap((line) => [...(line.lo || line.y), ...(line.hi || [])]).filter((v) => v != null);
    const log = spec.log && view.log && values.length > 0 && values.every((v) => v > 0);
    const ends = [data[0][0], data[0][data[0].length - 1]];
    const zoomed = (u) => data[0].length > 1 && (u.scales.x.min > ends[0] || u.scales.x.max < ends[1]);

    const readout = $("output", { className: "readout" });
    const keys = spec.lines.length < 2 ? [] : spec.lines.map((line, i) => {
      const form = "key line" + (line.dash || line.run ? " dashed" : "");
      const button = $("button", { type: "button", className: "key-button" }, $("i", { className: form }), line.name);
      button.onclick = () => { hidden.has(i) ? hidden.delete(i) : hidden.add(i); draw(); };
      button.style.setProperty("--k", `var(--${line.colour})`);
      button.setAttribute("aria-pressed", String(!hidden.has(i)));
      return button;
    });
    keys.push(...(spec.refs || []).map((ref) => keyOf("quiet", `${ref.name} ${number(ref.y)}${unit}`, "line dotted")));
    if (spec.tall && view.x === "step" && D.resumed.length) keys.push(keyOf("quiet", "resumed", "line dotted"));
    const best = spec.lines.findIndex((line) => line.best != null); // a ring around an evaluation of the first run
    if (best >= 0) keys.push(keyOf(spec.lines[best].colour, `best: ${spec.lines[best].said}`, "ring"));
    if ((spec.marks || []).length) keys.push(keyOf("bad", "steps not applied", "line"));
    const plot = frame(figure, keys, readout);

    const before = (s, i) => { // of a line without a point here: the last one before it
      for (let j = i; j >= 0; j--) if (me.u.data[s][j] != null) return me.u.data[s][j];
      return null;
    };
    const tell = (u) => {
      const i = u.cursor.idx;
      if (i == null || u.cursor.left < 0 || !me.u) return void (readout.textContent = "");
      const told = spec.lines.map((line, n) => (hidden.has(n) ? null : `${line.name} ${number(before(main[n], i))}${unit}`));
      readout.textContent = [along[view.x](u.data[0][i]), ...told].filter(Boolean).join(" · ");
    };
    const decorate = (u) => {
      const { ctx, bbox } = u, ratio = devicePixelRatio;
      ctx.save();
      ctx.strokeStyle = css("quiet");
      ctx.lineWidth = 1.5 * ratio;
      ctx.setLineDash([2 * ratio, 3 * ratio]);
      for (const ref of spec.refs || []) {
        const y = u.valToPos(ref.y, "y", true);
        if (y < bbox.top || y > bbox.top + bbox.height) continue;
        ctx.beginPath(); ctx.moveTo(bbox.left, y); ctx.lineTo(bbox.left + bbox.width, y); ctx.stroke();
      }
      for (const step of spec.tall && view.x === "step" ? D.resumed : []) { // where the run started again
        const x = u.valToPos(step, "x", true);
        if (x < bbox.left || x > bbox.left + bbox.width) continue;
        ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
      }
      ctx.setLineDash([]);
      ctx.strokeStyle = css("bad");
      for (const mark of view.x === "step" ? spec.marks || [] : []) {
        const x = u.valToPos(mark, "x", true), foot = bbox.top + bbox.height;
        if (x < bbox.left || x > bbox.left + bbox.width) continue;
        ctx.beginPath(); ctx.moveTo(x, foot); ctx.lineTo(x, foot - 10 * ratio); ctx.stroke();
      }
      ctx.restore();
    };
    const ring = (u) => {
      if (best < 0 || hidden.has(best)) return;
      const { ctx, bbox } = u, line = spec.lines[best], ratio = devicePixelRatio;
      const x = u.valToPos(X(line)[line.best], "x", true), y = u.valToPos(line.y[line.best], "y", true);
      if (x < bbox.left || x > bbox.left + bbox.width || y < bbox.top || y > bbox.top + bbox.height) return;
      ctx.save();
      ctx.strokeStyle = css(line.colour);
      ctx.lineWidth = 1.5 * ratio;
      ctx.beginPath(); ctx.arc(x, y, 7 * ratio, 0, 7); ctx.stroke();
      ctx.restore();
    };
    const onX = (x) => (x == null ? "" : view.x === "time" ? clock(x) : view.x === "step" ? x.toLocaleString("en") : number(x));
    const whole = view.x === "step" ? { incrs: [1, 2, 5].flatMap((k) => [...Array(9).keys()].map((p) => k * 10 ** p)).sort((a, b) => a - b) } : {};
    const u = new uPlot({
      width: plot.clientWidth,
      height: spec.tall ? Math.min(360, Math.max(240, innerHeight * 0.45)) : 190,
      legend: { show: false }, series: list, bands,
      scales: {
        x: { time: false, range: (u, lo, hi) => (lo == null ? [0, 1] : lo === hi ? [lo - 1, hi + 1] : [lo, hi]) },
        y: { distr: log ? 3 : 1, range: (u, lo, hi) => heights(spec, values, lo, hi, log, zoomed(u)) },
      },
      axes: [
        axis({ size: 28, space: 70, values: (u, v) => v.map(onX), ...whole }),
        axis({
          size: innerWidth < 720 ? 46 : 56, values: (u, v) => v.map((y) => (y == null ? "" : number(y) + unit)),
          ...(log ? { splits: (u, i, lo, hi) => ticks(lo, hi), filter: (u, splits) => splits } : {}),
        }),
      ],
      cursor: { sync: { key: "runs", scales: ["x", null] }, points: { size: 7 }, drag: { x: true, y: false } },
      hooks: { drawAxes: [decorate], draw: [ring], setCursor: [tell], setScale: [(u, key) => key === "x" && zoomTogether(u)] },
    }, data, plot);
    me.u?.destroy();
    me.u = u;
    steer(plot, u);
    asTable(figure, [view.x, ...spec.lines.map((line) => line.name)], () => {
      const every = Math.max(1, Math.ceil(data[0].length / 40)), last = data[0].length - 1;
      const rows = data[0].map((x, i) => [along[view.x](x), ...main.map((s) => number(data[s][i]))]);
      return rows.filter((_, i) => i % every === 0 || i === last);
    });
  }
  live.push(me);
  draw();
}

let zooming = false;
function zoomTogether(u) {
  if (zooming) return;
  zooming = true;
  for (const { u: other, linked } of live)
    if (linked && other && other !== u) other.setScale("x", { min: u.scales.x.min, max: u.scales.x.max });
  zooming = false;
}
