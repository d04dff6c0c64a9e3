// The frame: reads the address, shows the view it names, and follows a run that is still going on.

import { ask, to, value } from "./address.js";
import { h, showTip } from "./dom.js";
import { compareView } from "./compare.js";
import { groupView, stepView } from "./groups.js";
import { jobView } from "./job.js";
import { lanesView } from "./lanes.js";
import { stepsView } from "./steps.js";
import { trajectoriesView } from "./trajectories.js";
import { trajectoryView } from "./trajectory.js";

const POLL_MS = 2000;
const TABS = [
  ["/", "Steps"],
  ["/trajectories", "Trajectories"],
  ["/lanes", "Time"],
  ["/compare", "Branches"],
  ["/job", "Job"],
];
const VIEWS = [
  [/^\/$/, stepsView],
  [/^\/step\/(-?\d+)$/, stepView],
  [/^\/group\/(-?\d+)$/, groupView],
  [/^\/trajectories$/, trajectoriesView],
  [/^\/trajectory\/(-?\d+)$/, trajectoryView],
  [/^\/lanes$/, lanesView],
  [/^\/compare$/, compareView],
  [/^\/job$/, jobView],
];

const view = document.getElementById("view");
let shown = 0; // counts views, so that an answer that comes late is not shown in another
let path = "";
let follow = null; // called every POLL_MS with the run as it is now

async function show() {
  const mine = ++shown;
  follow = null;
  showTip();
  if (path !== location.pathname) scrollTo(0, 0);
  path = location.pathname;
  tabs();
  try {
    const run = await ask("overview");
    if (mine !== shown) return;
    frame(run);
    const [pattern, make] = VIEWS.find(([pattern]) => pattern.test(path)) ?? VIEWS[0];
    const made = await make(run, ...(path.match(pattern)?.slice(1).map(Number) ?? []));
    if (mine !== shown) return;
    view.replaceChildren(...made.nodes.flat(Infinity).filter(Boolean));
    follow = made.follow ?? (() => {});
    document.title = `${made.title ? `${made.title} · ` : ""}${run.name} · staleflow`;
  } catch (error) {
    if (mine === shown) fail(error);
  }
}

function fail(error) {
  view.replaceChildren(
    h("p", { class: "error", role: "alert" }, error.message),
    h("p", {}, h("a", { href: to("/") }, "To the run's steps")),
  );
}

function tabs() {
  const here = ["/trajector", "/lanes", "/compare", "/job"].findIndex((start) => path.startsWith(start)) + 1;
  document
    .getElementById("nav")
    .replaceChildren(
      ...TABS.map(([href, name], i) => h("a", { href: to(href), "aria-current": i === here ? "page" : null }, name)),
    );
}

function frame(run) {
  const name = document.getElementById("name");
  name.textContent = run.name;
  name.title = run.folder;
  name.href = to("/");
  const state = document.getElementById("state");
  state.textContent = run.state;
  state.className = `state ${run.state.replace(" ", "-")}`;
}

async function poll() {
  if (follow && !document.hidden) {
    const mine = shown;
    try {
      const run = await ask("overview");
      if (mine === shown) {
        frame(run);
        await follow(run);
        document.getElementById("lost")?.remove();
      }
    } catch (error) {
      if (mine === shown && !document.getElementById("lost")) {
        view.prepend(h("p", { class: "error", id: "lost", role: "alert" }, error.message));
      }
    }
  }
  setTimeout(poll, POLL_MS);
}

addEventListener("addresschange", show);
show();
setTimeout(poll, POLL_MS);
