// Parts that several views share: figures of a trajectory, colours of versions, filters and pages.

import { changed, go, to, value } from "./address.js";
import { h, many, seconds, short, visible, visibleText } from "./dom.js";

const FIRST_HUE = 211,
  GOLDEN_ANGLE = 137.508; // turns that never meet again, and are far apart for neighbours

/** The style that colours by policy version, the same in all views: no two versions have the same hue. */
export const versionStyle = (version) =>
  version < 0 ? {} : { "--v": ((FIRST_HUE + version * GOLDEN_ANGLE) % 360).toFixed(1) };

/** A strip of a trajectory's segments in the colours of their versions. segments: [version, instance, tokens], or
 * [-1, role, tokens, seconds] of what an environment gave. */
export function strip(segments) {
  const total = segments.reduce((sum, [, , count]) => sum + count, 0);
  return h(
    "div",
    {
      class: "strip",
      title: segments
        .map(([version, where, count, lasted]) =>
          version < 0
            ? `${visibleText(where)}: ${many(count, "token")}, ${seconds(lasted)}`
            : `version ${version}: ${many(count, "token")} on ${where}`,
        )
        .join("\n"),
    },
    segments.map(([version, , count]) =>
      h("i", {
        class: version < 0 ? "given" : null,
        style: { ...versionStyle(version), flex: count / Math.max(1, total) },
      }),
    ),
  );
}

/** Who says a passage of a conversation, and how long an environment took for it. */
export function speaker(passage, ...more) {
  return h(
    "div",
    { class: "speaker" },
    h("b", {}, visible(passage.role)),
    ...more,
    passage.seconds > 0 ? h("span", { class: "quiet" }, seconds(passage.seconds)) : null,
  );
}

/** Facts about a trajectory as small labels, with what is out of the ordinary marked. */
export function labels(one, eta) {
  const dropped = one.fate !== "consumed";
  return h(
    "div",
    { class: "labels" },
    dropped
      ? h("span", { class: "warn" }, `${one.fate}: ${one.reason.replaceAll("_", " ")}`)
      : h(
          "span",
          { title: `v_traj ${one.v_traj}` },
          `staleness ${one.staleness}${eta === null ? "" : ` of ${eta}`}`,
        ),
    h("span", {}, `${short(one.response_tokens)} tokens`),
    one.turns > 1
      ? h("span", { title: `the environment took ${seconds(one.tool_s)}` }, many(one.turns, "turn"))
      : null,
    one.finish === "length" ? h("span", { class: "warn", title: "cut off at max_new_tokens" }, "cut off") : null,
    one.finish === "unfinished" ? h("span", { class: "warn" }, "unfinished") : null,
    one.error ? h("span", { class: "bad", title: one.error }, "reward failed") : null,
    !dropped && !one.loss_mask && !one.error ? h("span", { class: "warn" }, "no gradient") : null,
  );
}

/** A reward and, beside it, its advantage as a bar to the left or right of zero. widest: the largest |advantage|. */
export function rewardOf(one, widest) {
  if (!one.scored) return h("div", { class: "reward" }, h("b", { class: "quiet" }, "not scored"));
  const share = widest ? Math.min(1, Math.abs(one.advantage) / widest) * 50 : 0;
  return h(
    "div",
    { class: "reward" },
    h("b", {}, short(one.reward)),
    one.fate === "consumed"
      ? h(
          "span",
          { class: "advantage", title: `advantage ${one.advantage}` },
          h("i", {
            class: one.advantage < 0 ? "minus" : "plus",
            style: { width: `${share}%`, [one.advantage < 0 ? "right" : "left"]: "50%" },
          }),
        )
      : null,
    one.fate === "consumed"
      ? h("span", { class: "quiet" }, `${one.advantage < 0 ? "−" : "+"}${short(Math.abs(one.advantage))}`)
      : null,
  );
}

/** A text of a model or a data set, as it is, in its own direction. */
export function text(words, attributes = {}) {
  return h("pre", { dir: "auto", ...attributes }, visible(words));
}

/** A field for a `--where` expression; what is typed goes into the address. */
export function filter(example) {
  return h(
    "form",
    {
      class: "filter",
      role: "search",
      onsubmit: (event) => {
        event.preventDefault();
        go(changed({ where: event.target.elements.where.value.trim(), page: "" }));
      },
    },
    h("label", { for: "where" }, "Where"),
    h("input", {
      id: "where",
      name: "where",
      type: "search",
      value: value("where"),
      placeholder: example,
      spellcheck: "false",
      autocapitalize: "off",
      autocomplete: "off",
      onsearch: (event) => event.target.value === "" && value("where") && go(changed({ where: "", page: "" })),
    }),
    h("button", {}, "Filter"),
  );
}

/** A choice whose value is a parameter of the address. */
export function choice(name, label, options, fallback) {
  return h(
    "label",
    {},
    `${label} `,
    h(
      "select",
      {
        name,
        onchange: (event) =>
          go(changed({ [name]: event.target.value === fallback ? "" : event.target.value, page: "" })),
      },
      options.map(([key, shown]) => h("option", { value: key, selected: key === value(name, fallback) }, shown)),
    ),
  );
}

/** Links to the pages before and after. found: {page, pages, total}. */
export function pager(found, what) {
  const link = (page, name) =>
    page >= 1 && page <= found.pages
      ? h("a", { class: "button", href: changed({ page: page === 1 ? "" : page }) }, name)
      : h("span", { class: "button", "aria-disabled": "true" }, name);
  return h(
    "nav",
    { class: "pager", "aria-label": "Pages" },
    h("span", { class: "quiet" }, `${found.total.toLocaleString("en")} ${what}`),
    found.pages > 1
      ? [
          h("span", { class: "wide" }, link(1, "«")),
          link(found.page - 1, "‹ before"),
          h("span", { class: "quiet" }, `page ${found.page} of ${found.pages.toLocaleString("en")}`),
          link(found.page + 1, "next ›"),
          h("span", { class: "wide" }, link(found.pages, "»")),
        ]
      : null,
  );
}

/** The server's line about a wrong filter, where the list would be. */
export const failure = (error) => h("p", { class: "error", role: "alert" }, error.message);

/** What must be known to read a list, if there is such. */
export const note = (found) => (found.note ? h("p", { class: "quiet small" }, found.note) : null);

/** A link to a trajectory. */
export const trajectoryLink = (id, ...shown) =>
  h("a", { href: to(`/trajectory/${id}`) }, shown.length ? shown : String(id));
