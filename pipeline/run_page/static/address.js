// What is shown is told by the address alone, so that every view can be shared, bookmarked and gone back to.

/** The parameters of the present address; `value("page", 1)` reads one. */
export function value(name, fallback = "") {
  return new URLSearchParams(location.search).get(name) ?? fallback;
}

/** The address of a view. Parameters that are empty are left out; the branch is kept. */
export function to(path, parameters = {}) {
  const query = new URLSearchParams();
  const all = { branch: path.startsWith("/compare") ? "" : value("branch"), ...parameters };
  for (const [name, one] of Object.entries(all)) {
    if (one !== "" && one !== null && one !== undefined && !(name === "branch" && one === "main")) query.set(name, one);
  }
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}

/** The present address with some parameters changed. */
export function changed(parameters) {
  return to(location.pathname, { ...Object.fromEntries(new URLSearchParams(location.search)), ...parameters });
}

/** Go to an address of this page. replace: without a new entry in the history. */
export function go(address, { replace = false } = {}) {
  history[replace ? "replaceState" : "pushState"](null, "", address);
  dispatchEvent(new Event("addresschange"));
}

/** Ask the server. Throws an error with the server's line. */
export async function ask(what, parameters = {}) {
  const query = new URLSearchParams({ ...(value("branch") && { branch: value("branch") }), ...parameters });
  let answer;
  try {
    answer = await fetch(`/api/${what}?${query}`);
  } catch {
    throw new Error("the server does not answer; is `staleflow view` still running?");
  }
  let found;
  try {
    found = await answer.json();
  } catch {
    throw new Error(`the server failed on /api/${what} (${answer.status}); its terminal says why`);
  }
  if (!answer.ok) throw new Error(found.error);
  return found;
}

addEventListener("popstate", () => dispatchEvent(new Event("addresschange")));
document.addEventListener("click", (event) => {
  const link = event.target.closest("a[href^='/']");
  if (!link || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  if (link.getAttribute("href") !== location.pathname + location.search) go(link.getAttribute("href"));
});
