// The job of the run: its settings and results, beside those of a second run, and what an audit of the stored data says.

import { ask, changed, go, value } from "./address.js";
import { h, visible } from "./dom.js";
import { table } from "./evaluations.js";
import { failure } from "./parts.js";

export async function jobView(run) {
  const all = value("all") === "1";
  const { settings } = await ask("settings");
  const { tables } = run.other ? await ask("result_tables") : { tables: [] };
  const differs = (row) => (run.other ? row.value !== row.other : row.value !== row.default);
  const rows = settings
    .filter((row) => all || differs(row))
    .map((row) => [
      h("span", { title: row.doc }, visible(row.key)),
      h("code", {}, visible(row.value ?? "")),
      ...(run.other ? [h("code", {}, visible(row.other ?? ""))] : []),
      h("code", { class: "quiet" }, visible(row.default ?? "")),
    ]);
  const columns = ["setting", run.name, ...(run.other ? [run.other.name] : []), "default"];
  const which = run.other ? "Only settings that differ" : "Only settings that are not the default";
  const only = h("input", {
    type: "checkbox",
    checked: !all,
    onchange: (event) => go(changed({ all: event.target.checked ? "" : "1" }), { replace: true }),
  });
  return {
    title: "Job",
    nodes: [
      h("h1", {}, "Job"),
      h("p", { class: "quiet" }, h("code", {}, visible(run.folder))),
      audit(run),
      h("h2", {}, "Settings"),
      h("div", { class: "tools" }, h("label", {}, only, " ", which)),
      rows.length ? table(columns, rows) : h("p", {}, "There is none."),
      ...tables.map(({ title, columns, rows }) => [h("h2", {}, visible(title)), textTable(columns, rows)]).flat(),
    ],
  };
}

function textTable(columns, rows) {
  return table(
    columns.map(visible),
    rows.map((row) => row.map(visible)),
  );
}

function audit(run) {
  const answer = h("div", { "aria-live": "polite" });
  const check = async () => {
    button.disabled = true;
    answer.replaceChildren(h("p", { class: "quiet" }, "Reading everything that is stored …"));
    try {
      const report = await ask("audit");
      answer.replaceChildren(
        h("p", { class: report.proves ? "good" : "error" }, `The audit: ${report.verdict}.`),
        h("pre", { class: "prompt" }, visible(report.lines.join("\n"))),
      );
    } catch (error) {
      answer.replaceChildren(failure(error));
    }
    button.disabled = false;
  };
  const button = h("button", { onclick: check }, "Audit what is stored");
  return [
    h("h2", {}, "Audit"),
    h("div", { class: "tools" }, button, h("span", { class: "quiet" }, `of ${run.name}, from its stored data alone`)),
    answer,
  ];
}
