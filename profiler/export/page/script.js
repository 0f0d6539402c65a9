"use strict";
// Draws the page from the JSON beside it: the report, and for each device a tree of allocations, a step and the segments.

const data = JSON.parse(document.getElementById("data").textContent);
const report = data.report;
const words = {
  ...data.categories, requested: "requested, and not there", pending_free: "freed, in use on another stream", free: "free", mixed: "small blocks", others: "others",
};
const word = name => words[name] || name;
const color = name => name === "requested" ? "var(--bad)" : `var(--${words[name] ? name : "others"})`;
const kUnits = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]];
const unitOf = bytes => kUnits.find(unit => Math.abs(bytes) >= unit[1]) || kUnits[3];
const size = bytes => {
  const unit = unitOf(bytes);
  return `${(bytes / unit[1]).toFixed(unit[1] === 1 ? 0 : 2)} ${unit[0]}`;
};
// Black or white, whichever is read better on a colour (WCAG's relative luminance).
function inkOn(name) {
  const channels = d3.color(getComputedStyle(document.documentElement).getPropertyValue(`--${words[name] ? name : "others"}`).trim()).rgb();
  const linear = [channels.r, channels.g, channels.b].map(c => c / 255).map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179 ? "#000" : "#fff";
}

function legend(section, entries) {
  section.querySelector(".legend").replaceChildren(...entries.map(([text, fill]) => {
    const item = element("li", text), key = element("i");
    key.style.background = fill;
    item.prepend(key);
    return item;
  }));
}

const shortLine = source => (source || "").replace(/.*\//, "");
const one = selector => document.querySelector(selector);

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

const tip = one("#tip");
function showTip(event, lines) {
  tip.replaceChildren(...lines.map(line => element("div", line)));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 8))}px`;
}
const hideTip = () => { tip.hidden = true; };

// The verdict: the first paragraph of the report as text.
function showVerdict() {
  const [head, facts] = data.text.split("\n\n");
  const [headline, gpu] = head.replace(/^oomdiag: /, "").split(/ {2,}/);
  document.title = `oomdiag: ${headline}`;
  one("#headline").textContent = headline[0].toUpperCase() + headline.slice(1);
  one("#gpu").textContent = [gpu, report.command].filter(Boolean).join("  ·  ");
  if (report.outcome !== "ok") one("header").classList.add("failed");
  for (const line of (facts || "").split("\n")) {
    const found = /^ {2}(\S+)( by)? +(.*)$/.exec(line);
    if (!found) continue;
    one("#facts").append(element("dt", found[1] + (found[2] || "")), element("dd", found[3]));
  }
  one("#text").textContent = data.text;
}

// A chart whose x axis can be dragged, zoomed and walked with the keyboard. `draw(x)` draws all that hangs on it.
// `first`: the part of the domain that is seen at first. `under`: what the x axis counts.
function chart(holder, { height, domain, first = domain, top, label, under: unitOfX, format, draw, left = 78 }) {
  holder.replaceChildren();
  const width = Math.max(280, holder.clientWidth), margin = { left, right: 12, top: 18, bottom: 40 };
  const inner = { width: width - margin.left - margin.right, height: height - margin.top - margin.bottom };
  const svg = d3.select(holder).append("svg").attr("viewBox", `0 0 ${width} ${height}`).attr("height", height)
    .attr("role", "img").attr("tabindex", 0).attr("aria-label", label);
  const id = `clip-${holder.parentNode.id}`;
  svg.append("clipPath").attr("id", id).append("rect").attr("width", inner.width).attr("height", inner.height + 1);
  const all = svg.append("g").attr("transform", `translate(${margin.left},${margin.top})`);
  const x = d3.scaleLinear().domain(domain).range([0, inner.width]);
  const y = d3.scaleLinear().domain([0, top * 1.1]).range([inner.height, 0]);
  const unit = unitOf(top);
  const steps = d3.ticks(0, top * 1.1 / unit[1], 5).map(tick => tick * unit[1]);
  const axis = d3.axisLeft(y).tickValues(steps).tickFormat(bytes => `${+(bytes / unit[1]).toFixed(3)} ${unit[0]}`);
  all.append("g").attr("class", "grid").call(d3.axisLeft(y).tickValues(steps).tickSize(-inner.width).tickFormat(""));
  const body = all.append("g").attr("clip-path", `url(#${id})`);
  all.append("g").attr("class", "axis").call(axis);
  const under = all.append("g").attr("class", "axis").attr("transform", `translate(0,${inner.height})`);
  const labels = all.append("g").attr("aria-hidden", true);
  labels.append("text").attr("class", "axis-label").attr("text-anchor", "middle").attr("x", inner.width / 2).attr("y", inner.height + 34).text(unitOfX);
  labels.append("text").attr("class", "axis-label").attr("text-anchor", "middle")
    .attr("transform", `translate(${14 - left},${inner.height / 2}) rotate(-90)`).text("GPU memory");
  const ticks = Math.max(2, Math.floor(inner.width / 110));
  const redraw = now => {
    under.call(d3.axisBottom(now).ticks(ticks).tickFormat(format));
    draw({ body, all, x: now, y, inner, svg });
  };
  const zoom = d3.zoom().scaleExtent([1, 4000]).extent([[0, 0], [inner.width, inner.height]])
    .translateExtent([[0, 0], [inner.width, inner.height]])
    .filter(() => !d3.event.button && (d3.event.type !== "wheel" || d3.event.ctrlKey || document.activeElement === svg.node()))
    .on("zoom", () => redraw(d3.event.transform.rescaleX(x)));
  svg.call(zoom);
  svg.on("keydown", () => {
    const by = { ArrowLeft: [60, 1], ArrowRight: [-60, 1], "+": [0, 1.5], "=": [0, 1.5], "-": [0, 1 / 1.5], 0: null }[d3.event.key];
    if (by === undefined) return;
    d3.event.preventDefault();
    if (by === null) return svg.call(zoom.transform, d3.zoomIdentity);
    const factor = d3.zoomTransform(svg.node()).k;
    by[0] ? svg.call(zoom.translateBy, by[0] / factor, 0) : svg.call(zoom.scaleBy, by[1]);
  });
  redraw(x);
  const shown = (x(first[1]) - x(first[0])) / inner.width;
  if (shown < 1) svg.call(zoom.transform, d3.zoomIdentity.scale(1 / shown).translate(-x(first[0]), 0));
  return { svg, x, y, margin, zoomed: () => d3.zoomTransform(svg.node()).rescaleX(x) };
}

// The GPU of a snapshot may not be known.
const isSizeKnown = device => Boolean(device.device.name);

function limitLine(all, y, inner, bytes, text) {
  const line = all.selectAll("g.gpu-size").data([bytes]).join(enter => {
    const made = enter.append("g").attr("class", "gpu-size");
    made.append("line").attr("class", "limit");
    made.append("text").attr("class", "limit-text").attr("x", 6).attr("y", -5).text(text);
    return made;
  });
  line.attr("transform", `translate(0,${y(bytes)})`);
  line.select("line").attr("x2", inner.width);
}

function showRun(device) {
  const points = device.timeline, section = one("#run");
  section.hidden = points.length < 2;
  if (section.hidden) return;
  const most = d3.max(points, point => Math.max(point.allocated_bytes, point.reserved_bytes));
  const total = device.device.total_bytes, near = isSizeKnown(device) && total <= most * 2;
  const end = points[points.length - 1].time_ns, begin = points[0].time_ns;
  const kSteps = 4;  // of a run of many more, the last ones are seen at first
  const first = [report.steps > 2 * kSteps ? end - (end - begin) * kSteps / report.steps : begin, end];
  legend(section, [["allocated", "var(--activation)"], ["reserved (allocated and cached)", "var(--soft)"],
                   ...(near ? [["GPU memory", "var(--bad)"]] : [])]);
  const marks = device.marks.map(mark => ({ time: mark.time_ns, name: mark.name }));
  if (device.failure) marks.push({ time: Math.min(device.failure.time_ns, end), name: "out of memory", failed: true });
  const allocated = d3.area().curve(d3.curveStepAfter).y1(d => at.y(d.allocated_bytes));
  const reserved = d3.line().curve(d3.curveStepAfter).y(d => at.y(d.reserved_bytes));
  const at = { y: null };
  const drawn = chart(section.querySelector(".chart"), {
    height: 280, domain: [begin, end], first, under: "time since recording began", top: near ? Math.max(total, most) : most, format: ns => `${+(ns / 1e9).toFixed(6)} s`,
    label: `allocated and reserved bytes over time; the most allocated is ${size(device.peak.allocated_bytes)}`,
    draw: ({ body, all, x, y, inner }) => {
      at.y = y;
      body.selectAll("path.allocated").data([points]).join("path").attr("class", "allocated")
        .attr("d", allocated.x(d => x(d.time_ns)).y0(y(0)));
      body.selectAll("path.reserved").data([points]).join("path").attr("class", "reserved").attr("d", reserved.x(d => x(d.time_ns)));
      const groups = body.selectAll("g.mark").data(marks).join(enter => {
        const made = enter.append("g").attr("class", mark => mark.failed ? "mark failed" : "mark");
        made.append("line").attr("y2", inner.height);
        made.append("text").attr("y", (mark, i) => 12 + 14 * (i % 4));
        return made;
      }).attr("transform", mark => `translate(${x(mark.time)},0)`);
      groups.select("text").text(mark => mark.name).attr("x", mark => x(mark.time) > inner.width / 2 ? -5 : 5)
        .attr("text-anchor", mark => x(mark.time) > inner.width / 2 ? "end" : "start");
      if (near) limitLine(all, y, inner, total, `GPU memory: ${size(total)}`);
    },
  });
  const nearest = d3.bisector(d => d.time_ns).left;
  drawn.svg.on("mousemove", () => {
    const time = drawn.zoomed().invert(d3.mouse(drawn.svg.node())[0] - drawn.margin.left);
    const point = points[Math.max(0, Math.min(points.length - 1, nearest(points, time)))];
    showTip(d3.event, [`${(point.time_ns / 1e9).toFixed(6)} s`, `allocated ${size(point.allocated_bytes)}`,
                       `reserved ${size(point.reserved_bytes)}`]);
  }).on("mouseleave", hideTip);
}

// After an OOM the last row ends with the failed request, as if it had been granted: it gets a band of its own.
function splitRequest(rows, bytes) {
  const last = rows[rows.length - 1], before = rows[rows.length - 2];
  if (!before) return;
  const name = Object.keys(data.categories).find(category => last[category] - before[category] >= bytes);
  if (!name) return;
  last[name] -= bytes;
  last.requested = bytes;
  for (const row of rows.slice(0, -1)) row.requested = 0;
}

function showStep(device, picture) {
  const section = one("#step"), step = picture.step;
  section.hidden = !step || step.points.length < 2;
  if (section.hidden) return;
  one("#step-title").textContent = device.failure ? `Step ${step.step}, up to the request that failed` : `Step ${step.step}`;
  const rows = step.points.map(([position, bytes]) => {
    const row = { position };
    Object.keys(data.categories).forEach((name, i) => { row[name] = bytes[i]; });
    row.sum = d3.sum(bytes);
    return row;
  });
  const last = rows[rows.length - 1];
  if (device.failure) splitRequest(rows, device.failure.requested_bytes);
  const used = [...Object.keys(data.categories), "requested"].filter(name => rows.some(row => row[name] > 0));
  legend(section, used.map(name => [word(name), color(name)]));
  // The last change is to be seen, too: at an OOM it is the request.
  rows.push({ ...last, position: last.position + Math.max(1, last.position / 40) });
  const series = d3.stack().keys(used)(rows);
  const available = device.device.total_bytes - device.card.non_pytorch_bytes;
  const top = d3.max(rows, row => row.sum), near = isSizeKnown(device) && available <= top * 2;
  const drawn = chart(section.querySelector(".chart"), {
    height: 340, domain: [0, Math.max(1, rows[rows.length - 1].position)], top: near ? Math.max(available, top) : top,
    under: "allocations and frees since the step began", format: n => Number.isInteger(n) ? d3.format(",")(n) : "",
    label: `bytes by category over the allocations and frees of step ${step.step}; at most ${size(top)}`,
    draw: ({ body, all, x, y, inner }) => {
      const area = d3.area().curve(d3.curveStepAfter).x(d => x(d.data.position)).y0(d => y(d[0])).y1(d => y(d[1]));
      const spans = body.selectAll("g.span").data(step.phases).join(enter => {
        const made = enter.append("g").attr("class", "span");
        made.append("rect").attr("class", "phase").attr("height", inner.height);
        return made;
      });
      spans.attr("transform", d => `translate(${x(d[1])},0)`);
      spans.select("rect").attr("width", d => Math.max(0, x(d[2]) - x(d[1]))).attr("display", (d, i) => i % 2 ? "none" : null);
      const clamp = position => Math.max(0, Math.min(inner.width, x(position)));
      all.selectAll("text.phase-text").data(step.phases).join("text").attr("class", "phase-text").attr("y", -5)
        .attr("x", d => clamp(d[1]) + 2).text(d => clamp(d[2]) - clamp(d[1]) > 66 ? d[0] : "");
      body.selectAll("path.band").data(series).join("path").attr("class", "band").attr("fill", d => color(d.key)).attr("d", area);
      if (near) limitLine(all, y, inner, available, `available to PyTorch: ${size(available)}`);
    },
  });
  const nearest = d3.bisector(d => d.position).left;
  drawn.svg.on("mousemove", () => {
    const position = drawn.zoomed().invert(d3.mouse(drawn.svg.node())[0] - drawn.margin.left);
    const row = rows[Math.max(0, Math.min(rows.length - 1, nearest(rows, position) - 1))];
    const held = used.filter(name => row[name] > 0).sort((a, b) => row[b] - row[a]);
    showTip(d3.event, [`${size(row.sum)} after ${row.position} allocations and frees`,
                       ...held.map(name => `${word(name)} ${size(row[name])}`)]);
  }).on("mouseleave", hideTip);
}

function showOwners(device, picture) {
  const section = one("#owners"), holder = section.querySelector(".chart");
  section.hidden = !picture.owners.bytes;
  if (section.hidden) return;
  holder.replaceChildren();
  const width = Math.max(280, holder.clientWidth), row = 24;
  const root = d3.hierarchy(picture.owners).sum(d => d.bytes - d3.sum(d.children || [], child => child.bytes));
  const height = (root.height + 1) * row;
  d3.partition().size([width, height])(root);
  const category = node => { while (node.depth > 1) node = node.parent; return node.data.name; };
  const name = node => node.depth === 0 ? "allocated" : node.depth === 1 ? word(node.data.name) : node.data.name;
  const svg = d3.select(holder).append("svg").attr("viewBox", `0 0 ${width} ${height}`).attr("height", height)
    .attr("role", "tree").attr("aria-label", "top allocations");
  let shown = root;
  const nodes = svg.selectAll("g").data(root.descendants()).join("g").attr("class", "node").attr("tabindex", 0)
    .attr("role", "treeitem").attr("aria-label", node => `${name(node)}, ${size(node.data.bytes)}`);
  nodes.append("rect").attr("height", row - 1).attr("fill", node => node.depth ? color(category(node)) : "var(--soft)")
    .attr("fill-opacity", node => Math.max(0.8, 1 - 0.06 * Math.max(0, node.depth - 1)));
  nodes.append("text").attr("x", 5).attr("y", 16).style("fill", node => node.depth ? inkOn(category(node)) : "var(--ground)");
  const path = node => node.ancestors().reverse().map(name).join(" › ");
  function look(node) {
    shown = node;
    one("#trail").textContent = `${path(node)}: ${size(node.data.bytes)}`;
    const span = node.x1 - node.x0, place = d => (d - node.x0) / span * width;
    const clamp = d => Math.max(0, Math.min(width, place(d)));
    const visible = other => other.x1 > node.x0 && other.x0 < node.x1;
    nodes.attr("display", other => visible(other) && clamp(other.x1) - clamp(other.x0) > 0.5 ? null : "none")
      .attr("transform", other => `translate(${clamp(other.x0)},${other.y0})`);
    nodes.select("rect").attr("width", other => Math.max(0, clamp(other.x1) - clamp(other.x0)));
    nodes.select("text").text(other => {
      const letters = Math.floor((clamp(other.x1) - clamp(other.x0) - 10) / 6.6);
      const whole = `${name(other)}  ${size(other.data.bytes)}`;
      if (letters >= whole.length) return whole;
      return letters >= 4 ? name(other).slice(0, letters - 1) + (name(other).length > letters - 1 ? "…" : "") : "";
    });
  }
  nodes.on("click", look).on("mousemove", node => showTip(d3.event, [path(node), `${size(node.data.bytes)} in ${node.data.blocks} blocks`]))
    .on("mouseleave", hideTip).on("keydown", node => {
      if (d3.event.key === "Enter" || d3.event.key === " ") { d3.event.preventDefault(); look(node); }
      if (d3.event.key === "Escape") look(shown.parent || root);
    });
  look(root);
}

function showSegments(device, picture) {
  const section = one("#segments"), holder = section.querySelector(".chart");
  section.hidden = !picture.segments.length;
  if (section.hidden) return;
  holder.replaceChildren();
  const width = Math.max(280, holder.clientWidth), left = 112, row = 20, gap = 6;
  const groups = d3.nest().key(segment => JSON.stringify([segment.bytes, segment.kind, segment.blocks.map(block => block.slice(0, 3))]))
    .entries(picture.segments).map(group => ({ ...group.values[0], count: group.values.length }));
  const fragmented = device.cause && device.cause.kind === "fragmentation";
  const shown = groups.slice(0, fragmented ? 24 : 8), largest = d3.max(shown, segment => segment.bytes);
  const height = shown.length * (row + gap);
  const svg = d3.select(holder).append("svg").attr("viewBox", `0 0 ${width} ${height}`).attr("height", height)
    .attr("role", "img").attr("aria-label", `${picture.segments.length} segments`);
  const x = d3.scaleLinear().domain([0, largest]).range([0, width - left - 4]);
  const rows = svg.selectAll("g").data(shown).join("g").attr("transform", (d, i) => `translate(0,${i * (row + gap)})`);
  rows.append("text").attr("x", left - 8).attr("y", 14).attr("text-anchor", "end").text(segment => (segment.count > 1 ? `${segment.count} × ` : "") + size(segment.bytes));
  const say = piece => `${word(piece[2])} ${size(piece[1])}${piece[3] ? `: ${piece[3]}` : ""}`;
  rows.append("g").attr("transform", `translate(${left},0)`).selectAll("rect").data(segment => segment.blocks).join("rect")
    .attr("class", "piece").attr("x", piece => x(piece[0])).attr("height", row)
    .attr("width", piece => Math.max(0.8, x(piece[0] + piece[1]) - x(piece[0])))
    .attr("fill", piece => piece[2] === "free" ? "var(--free)" : color(piece[2]))
    .on("mousemove", piece => { one("#piece").textContent = say(piece); showTip(d3.event, [say(piece), ...(piece[4] ? piece[4].split(" ← ").map((part, i) => (i ? "← " : "made by ") + part) : [])]); })
    .on("mouseleave", hideTip);
  rows.append("title").text(segment => `${size(segment.used_bytes)} of ${size(segment.bytes)} in use, largest free block ` +
                                       `${size(segment.largest_free_block_bytes)} ${segment.kind}`);
  const hidden = picture.segments.length - d3.sum(shown, segment => segment.count);
  one("#piece").textContent = hidden > 0 ? `${hidden} more are not shown` : "\u00a0";
}

// A table whose columns are {title, value, text, number}; sorts by a click on a title.
function fill(section, columns, rows, { sortable = false, filter = () => true, drawn = () => {} } = {}) {
  section.hidden = rows.length === 0;
  const head = element("tr"), body = section.querySelector("tbody");
  let order = null;
  const draw = () => {
    const list = rows.filter(filter);
    if (order) list.sort((a, b) => order.down * d3.ascending(order.column.value(a), order.column.value(b)));
    drawn(list.length);
    body.replaceChildren(...list.map(item => {
      const line = element("tr");
      for (const column of columns) {
        const cell = element("td", undefined, column.number ? "number" : "");
        const content = column.text(item);
        cell.append(...(Array.isArray(content) ? content : [content]));
        line.append(cell);
      }
      return line;
    }));
  };
  for (const column of columns) {
    const cell = element(column.title ? "th" : "td", undefined, column.number ? "number" : "");
    if (column.title) cell.scope = "col";
    if (sortable) {
      const button = element("button", column.title);
      button.onclick = () => {
        order = { column, down: order && order.column === column ? -order.down : column.number ? -1 : 1 };
        for (const other of head.children) other.removeAttribute("aria-sort");
        cell.setAttribute("aria-sort", order.down > 0 ? "ascending" : "descending");
        draw();
      };
      cell.append(button);
    } else {
      cell.textContent = column.title;
    }
    head.append(cell);
  }
  section.querySelector("thead").replaceChildren(head);
  draw();
  return draw;
}

const bytesColumn = (title, value) => ({ title, value, number: true, text: item => value(item) === null ? "–" : size(value(item)) });

function showSaved(device) {
  const shape = tensor => `[${tensor.shape.join(", ")}] ${tensor.dtype || ""}`;
  const made = tensor => [tensor.module, tensor.made_by, shortLine(tensor.source)].filter(Boolean).join(" ← ");
  const kept = tensor => tensor.saved_by.map((node, i) => [node, tensor.saved_by_modules[i]].filter(Boolean).join(" ← ")).join(", ");
  const search = one("#search");
  search.value = "";
  const draw = fill(one("#saved"), [
    bytesColumn("bytes", tensor => tensor.bytes),
    { title: "shape", value: shape, text: shape },
    { title: "made by", value: made, text: made },
    { title: "kept by", value: kept, text: kept },
  ], device.saved_tensors, {
    sortable: true,
    drawn: count => { one("#no-match").hidden = count > 0; },
    filter: tensor => `${shape(tensor)} ${made(tensor)} ${kept(tensor)}`.toLowerCase().includes(search.value.toLowerCase()),
  });
  search.oninput = draw;
}

function verdictOf(fix) {
  const fits = fix.fits !== null ? fix.fits : fix.predicted_fits;
  if (fix.postpones_to_step !== null) return element("span", `no: postpones it to about step ${fix.postpones_to_step}`, "no");
  if (fits === null) return element("span", "unknown");
  return element("span", fits ? "yes" : "no", fits ? "yes" : "no");
}

// Lines of code, and a button that copies them.
function code(lines) {
  const text = lines.join("\n"), box = element("div", undefined, "code"), button = element("button", "Copy");
  button.onclick = () => navigator.clipboard.writeText(text).then(() => { button.textContent = "Copied"; },
                                                                  () => { getSelection().selectAllChildren(box.firstChild); });
  const lines_of_code = element("pre", text);
  lines_of_code.tabIndex = 0;  // long lines are scrolled by keys, too
  box.append(lines_of_code, button);
  return box;
}

function showFixes(device) {
  const columns = [
    { title: "fix", value: fix => fix.label, text: fix => {
      const parts = [element("div", fix.label)];
      if (fix.how.length) parts.push(code(fix.how));
      if (fix.costs) parts.push(element("small", `costs: ${fix.costs}`));
      return parts;
    } },
    { title: "peak, predicted", number: true, value: fix => fix.predicted_peak_bytes,
      text: fix => fix.frees_bytes ? `frees ${size(fix.frees_bytes)}` : (fix.at_least ? "≥ " : "") + size(fix.predicted_peak_bytes) },
    bytesColumn("measured", fix => fix.measured_peak_bytes),
    { title: "fits", value: () => 0, text: verdictOf },
  ];
  const kFirst = 3, more = one("#more-fixes");
  const rest = device.fixes.slice(kFirst);
  fill(one("#fixes"), columns, device.fixes.slice(0, kFirst));
  fill(more, columns, rest);
  more.querySelector("summary").textContent = `${rest.length} more`;
}

// The whole GPU at that moment: what PyTorch allocated by category, what it caches, what others hold, what is free.
function showMemory(device) {
  const rows = Object.entries(device.categories).map(([name, bytes]) => ({ name: word(name), bytes, fill: color(name) }));
  const memory = device.card;
  rows.push({ name: "pending frees (in use on another stream)", bytes: memory.pending_free_bytes, fill: "var(--pending_free)" },
            { name: "cached (reserved, not allocated)", bytes: memory.cached_bytes, fill: "var(--soft)" },
            { name: "non-PyTorch memory", bytes: memory.non_pytorch_bytes, fill: "var(--others)" },
            { name: "free", bytes: memory.free_bytes, fill: "var(--free)" });
  const shown = rows.filter(row => row.bytes !== 0), most = d3.max(shown, row => row.bytes);
  one("#memory-title").textContent = device.failure ? "GPU memory at the failure" : "GPU memory at the peak";
  fill(one("#memory"), [
    { title: "what", value: row => row.name, text: row => row.name },
    bytesColumn("bytes", row => row.bytes),
    { title: "", value: () => 0, text: row => barOf(row.bytes / most, row.fill) },
  ], shown);
}

function showGrowth(device) {
  fill(one("#growth"), [
    { title: "what", value: d => d.kind, text: d => d.kind.replace(/_/g, " ") },
    { title: "where", value: d => d.op, text: d => [d.op, d.module, shortLine(d.source)].filter(Boolean).join(" ← ") },
    bytesColumn("per step", d => d.bytes_per_step),
    bytesColumn("so far", d => d.grown_bytes),
  ], device.growth);
}

function showRanks() {
  fill(one("#ranks"), [
    { title: "process", value: d => d.rank, text: d => d.rank === null ? `process ${d.pid}` : `rank ${d.rank}` },
    bytesColumn("peak", d => d.peak.allocated_bytes),
    bytesColumn("reserved", d => d.peak.reserved_bytes),
    { title: "outcome", value: d => d.outcome, text: d => d.failure ? `out of memory in ${d.failure.phase}, step ${d.failure.step}` : d.outcome },
  ], report.ranks);
}

// A bar as wide as a share of the table's largest row.
function barOf(share, fill) {
  const bar = element("div", undefined, "bar"), part = element("i");
  part.style.width = `${Math.max(0, share) * 100}%`;
  part.style.background = fill;
  bar.append(part);
  return bar;
}

const boundColors = { compute: "var(--activation)", "memory bandwidth": "var(--gradient)", bus: "var(--input)", launches: "var(--workspace)", host: "var(--soft)", communication: "var(--output)" };

// A metered run: where the modelled time of a step goes, by phase and by module, and what bounds each.
function showWork() {
  const work = report.work, section = one("#work");
  section.hidden = !work;
  if (!work) return;
  const ms = ns => (ns / 1e6).toPrecision(3), giga = value => d3.format(",.3~g")(value / 1e9);
  const time = work.step_time_ns === null ? `Step ${work.step}; its time is not known: ${work.why_no_time}.` :
    `Step ${work.step} takes ${ms(work.step_time_ns)} ms on this GPU (modelled; ${ms(work.step_time_low_ns)} to ${ms(work.step_time_high_ns)} likely), ` +
    `bound by ${work.bound_by}; ${work.utilization_percent} % of the peak rate. The host takes ${ms(work.host_time_ns)} ms to submit it.`;
  one("#work-note").textContent = work.not_metered ? `${time} ${work.not_metered} calls were not metered.` : time;
  const columns = (title, rows) => {
    const most = d3.max(rows, row => row.time_ns) || 1;
    return [
      { title, value: row => row.name, text: row => row.name },
      { title: "ms", number: true, value: row => row.time_ns, text: row => row.time_ns === null ? "-" : ms(row.time_ns) },
      { title: "bound by", value: row => row.bound_by || "", text: row => row.bound_by
        ? [barOf(row.time_ns / most, boundColors[row.bound_by]), element("small", row.bound_by)] : "-" },
      { title: "GFLOP", number: true, value: row => row.flops, text: row => giga(row.flops) },
      { title: "GB moved", number: true, value: row => row.memory_bytes, text: row => giga(row.memory_bytes) },
      { title: "kernels", number: true, value: row => row.launches, text: row => String(row.launches) },
    ];
  };
  const bounds = new Set([...work.phases, ...work.modules].map(row => row.bound_by).filter(Boolean));
  legend(section, Object.entries(boundColors).filter(([name]) => bounds.has(name)));
  const [phases, modules] = section.querySelectorAll(".scroll");
  fill(phases, columns("phase", work.phases), work.phases);
  fill(modules, columns("module", work.modules), work.modules, { sortable: true });
}

function showLimits() {
  one("#limitations").hidden = report.limitations.length === 0;
  one("#limitations ul").replaceChildren(...report.limitations.map(limit => element("li", limit)));
}

let current = report.main_device;
function showGpu(index) {
  current = index;
  const device = report.devices[index], picture = data.gpus[index];
  document.querySelectorAll("#gpus button").forEach((button, i) => button.setAttribute("aria-pressed", String(i === index)));
  showRun(device);
  showStep(device, picture);
  showOwners(device, picture);
  showSegments(device, picture);
  showSaved(device);
  showFixes(device);
  showMemory(device);
  showGrowth(device);
  // What grows is the answer to a leak, and the processes are that of a job.
  const leaks = device.growth.length > 0 && (device.cause ? device.cause.kind === "leak" : device.out_of_memory_near_step !== null);
  one("main").insertBefore(one("#growth"), leaks ? one("main").firstChild : one("#step"));
}

function start() {
  showVerdict();
  showRanks();
  showWork();
  showLimits();
  if (!report.devices.length) {
    for (const id of ["run", "step", "owners", "segments", "saved", "fixes", "memory", "growth"]) one(`#${id}`).hidden = true;
    return;
  }
  one("#gpus").hidden = report.devices.length < 2;
  report.devices.forEach((device, i) => {
    const button = element("button", `cuda:${device.device.index}${device.failure ? ": out of memory" : ""}`);
    button.onclick = () => showGpu(i);
    one("#gpus").append(button);
  });
  showGpu(current);
  let waiting = 0;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(() => showGpu(current), 150); });
}

// On paper nothing can be opened.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(part => { part.open = true; }));
start();
