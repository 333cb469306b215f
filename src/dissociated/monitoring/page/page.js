"use strict";
// Shows /status.json, which it requests each second. Names come from users, so they are only ever set as text.

const UNITS = ["B", "kB", "MB", "GB", "TB", "PB"];
const PERIOD = 300; // seconds that the chart shows
const STATUS = new URL("status.json", location.origin + location.pathname); // without a password in the page's address

const element = (id) => document.getElementById(id);
const write = (id, text) => { if (element(id).textContent !== text) element(id).textContent = text; };

function size(bytes) {
  if (bytes === null) return "unknown";
  let unit = 0;
  while (bytes >= 999.5 && unit < UNITS.length - 1) { bytes /= 1000; unit += 1; }
  return `${unit ? Number(bytes.toPrecision(3)) : Math.round(bytes)} ${UNITS[unit]}`;
}

const count = (number) => (number === null ? "unknown" : number.toLocaleString("en"));
const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

function duration(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString();

// A column: its title, the field, how it is shown, and whether it is a number.
const text = (title, field) => ({ title, field, show: (value) => value ?? "" });
const number = (title, field, show = count) => ({ title, field, show, number: true });

const TABLES = {
  datasets: [
    text("name", "name"), number("rows", "rows"), number("size", "size", size), number("versions", "versions"),
    number("consumers", "consumers"), number("leases", "leases"), number("streams", "streams"), number("sent", "bytes", size),
  ],
  consumers: [
    text("peer", "peer"), text("transport", "transport"), text("dataset", "dataset"), text("state", "state"),
    number("for", "seconds", duration), number("messages", "messages"), number("bytes", "bytes", size),
    number("a second", "rate", size), number("leases", "leases"), number("kept", "kept", size),
  ],
  changes: [
    { title: "time", field: "time", show: clock }, text("change", "kind"), text("dataset", "dataset"),
    { title: "version", field: "version", show: (value) => value ?? "", number: true },
    { title: "rows", field: "rows", show: (value) => (value === null ? "" : count(value)), number: true },
    { title: "size", field: "nbytes", show: (value) => (value === null ? "" : size(value)), number: true }, text("why", "why"),
  ],
  nodes: [
    text("host", "host"), text("catalog", "catalog"), { title: "state", field: "alive", show: (alive, node) => (!node.registered ? "refused" : alive ? "alive" : "away") },
    number("last heard", "seconds", (value) => `${duration(value)} ago`), text("problem", "problem"),
  ],
  listeners: [text("listens at", "uri"), number("open", "open"), number("accepted", "accepted"), number("refused", "refused")],
};
const EMPTY = {
  datasets: "no datasets", consumers: "no consumers", changes: "no changes since the server started", nodes: "none",
  listeners: "no listeners",
};
const order = {}; // for each table the field, and 1 or -1
let latest = null; // the latest status

function sorted(name, rows) {
  const sorting = order[name];
  if (!sorting) return rows;
  const key = (row) => row[sorting.field];
  return [...rows].sort((a, b) => {
    const [x, y] = [key(a), key(b)];
    if (x === y) return 0;
    if (x === null) return 1; // unknown values come last
    if (y === null) return -1;
    return (x < y ? -1 : 1) * sorting.direction;
  });
}

function makeHead(name) {
  const row = document.createElement("tr");
  for (const column of TABLES[name]) {
    const cell = document.createElement("th");
    cell.scope = "col";
    if (column.number) cell.className = "number";
    const button = document.createElement("button");
    button.textContent = column.title;
    button.addEventListener("click", () => {
      const current = order[name];
      const initial = column.number ? -1 : 1;
      const isReversed = current && current.field === column.field;
      order[name] = { field: column.field, direction: isReversed ? -current.direction : initial };
      row.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      cell.setAttribute("aria-sort", order[name].direction > 0 ? "ascending" : "descending");
      show();
    });
    cell.append(button);
    row.append(cell);
  }
  const head = document.createElement("thead");
  head.append(row);
  element(name).append(head, document.createElement("tbody"));
}

function fill(name, rows) {
  const body = element(name).tBodies[0];
  const made = sorted(name, rows).map((row) => {
    const line = document.createElement("tr");
    for (const column of TABLES[name]) {
      const cell = document.createElement("td");
      cell.textContent = column.show(row[column.field], row);
      if (column.number) cell.className = "number";
      if (column.field === "why") cell.className = "why";
      if (column.field === "name" || column.field === "dataset") { cell.className = "name"; cell.title = cell.textContent; }
      if ((column.field === "alive" && !row.alive) || (column.field === "state" && row.state === "cut off")) cell.className = "bad";
      line.append(cell);
    }
    return line;
  });
  if (!made.length) {
    const cell = document.createElement("td");
    cell.className = "empty";
    cell.colSpan = TABLES[name].length;
    cell.textContent = EMPTY[name];
    const line = document.createElement("tr");
    line.append(cell);
    made.push(line);
  }
  body.replaceChildren(...made);
}

// Return the bytes sent in each second: [seconds since 1970, bytes per second].
function rates(samples) {
  const result = [];
  for (let at = 1; at < samples.length; at += 1) {
    const [[before, from], [when, to]] = [samples[at - 1], samples[at]];
    if (when > before) result.push([when, Math.max(0, to - from) / (when - before)]);
  }
  return result;
}

let points = [];
function draw(samples, now) {
  points = rates(samples);
  const peak = Math.max(1, ...points.map(([, rate]) => rate));
  const x = (when) => (600 * (1 - (now - when) / PERIOD)).toFixed(1);
  const y = (rate) => (116 - (110 * rate) / peak).toFixed(1);
  const line = points.map(([when, rate], at) => `${at ? "L" : "M"}${x(when)} ${y(rate)}`).join("");
  const path = (kind, d) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", "path");
    made.setAttribute("class", kind);
    made.setAttribute("d", d);
    return made;
  };
  const area = points.length ? `${line}L${x(points.at(-1)[0])} 120L${x(points[0][0])} 120Z` : "";
  element("chart").replaceChildren(path("area", area), path("line", line));
  write("peak", points.length ? `at most ${size(Math.max(0, ...points.map(([, rate]) => rate)))}/s` : "");
}

function point(event) {
  if (!latest || !points.length) return;
  const box = element("chart").getBoundingClientRect();
  const when = latest.now - PERIOD * (1 - (event.clientX - box.left) / box.width);
  const near = points.reduce((best, one) => (Math.abs(one[0] - when) < Math.abs(best[0] - when) ? one : best));
  write("pointed", `${clock(near[0])}: ${size(near[1])}/s`);
}

function show() {
  const status = latest;
  if (!status) return;
  write("where", `${status.host} · ${status.version} · process ${status.pid} · up ${duration(status.seconds)}${status.state === "stopping" ? " · stopping" : ""}`
    + (status.catalog ? ` · ${status.catalog}` : ""));
  const recent = rates(status.samples.slice(-6)).map(([, rate]) => rate);
  write("rate", `${size(recent.length ? recent.reduce((a, b) => a + b) / recent.length : 0)}/s`);
  write("sent", `${size(status.totals.bytes)} in ${plural(status.totals.streams, "stream")}`
    + (status.totals.flight ? `, and ${plural(status.totals.flight, "stream")} over Flight` : ""));
  write("consumers-now", count(status.consumer_count));
  const { done, gone, refused, failed } = status.totals;
  write("connections", `ended: ${count(done)} done, ${count(gone)} gone, ${count(refused)} refused, ${count(failed)} failed`);
  write("leases", count(status.leases));
  write("kept", status.kept ? `${size(status.kept)} held by consumers that were cut off` : "messages, or addresses, that consumers hold");
  const store = status.store;
  write("held", store ? size(store.held) : "none");
  const byFileSystem = store && store.free != null ? store.held + store.free : Infinity;
  const limit = store ? Math.min(store.limit || Infinity, byFileSystem) : Infinity;
  element("store").hidden = limit === Infinity;
  if (limit !== Infinity) element("store").value = limit ? store.held / limit : 1;
  const isFull = limit !== Infinity && store.held >= limit;
  const free = limit !== Infinity && byFileSystem <= limit ? `; ${size(store.free)} free in its file system` : "";
  const puts = status.totals.refused_puts ? `; ${plural(status.totals.refused_puts, "put")} refused` : "";
  element("limit").classList.toggle("bad", isFull);
  write("limit", (!store ? "this server has no store" : limit === Infinity ? "no limit" : `${isFull ? "full, " : ""}of ${size(limit)}${free}`) + puts);
  draw(status.samples, status.now);
  const query = element("search").value;
  const matching = status.datasets.filter((dataset) => dataset.name.includes(query));
  const part = (all, here) => (here < all ? `the ${count(here)} most read of ${count(all)}` : count(all));
  write("dataset-count", part(status.dataset_count, status.datasets.length));
  write("consumer-count", part(status.consumer_count, status.consumers.length));
  const kinds = Object.entries(status.changed).filter(([, often]) => often);
  write("changed", kinds.map(([kind, often]) => `${count(often)} ${kind}`).join(", "));
  fill("datasets", matching);
  fill("consumers", status.consumers);
  fill("changes", status.changes);
  fill("listeners", status.listeners);
  write("unreadable", status.unreadable_parts ? `${plural(status.unreadable_parts, "part")} of datasets cannot be read` : "");
  element("nodes-section").hidden = !status.nodes.length;
  fill("nodes", status.nodes);
  document.querySelector("main").hidden = false;
}

let lastAnswer = null; // milliseconds since 1970
async function refresh() {
  try {
    const answer = await fetch(STATUS, { cache: "no-store", signal: AbortSignal.timeout(10000) });
    if (!answer.ok) throw new Error(`${answer.status}`);
    latest = await answer.json();
    lastAnswer = Date.now();
    element("live").className = "";
    write("live", "live");
    show();
  } catch (error) {
    element("live").className = "lost";
    write("live", lastAnswer ? `no answer since ${new Date(lastAnswer).toLocaleTimeString()}` : "no answer");
  }
  setTimeout(refresh, 1000);
}

Object.keys(TABLES).forEach(makeHead);
element("search").addEventListener("input", show);
element("chart").addEventListener("pointermove", point);
element("chart").addEventListener("pointerleave", () => write("pointed", ""));
refresh();
