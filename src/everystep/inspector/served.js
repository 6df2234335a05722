// A page that a program on this machine serves. The token came behind the #, which no browser sends
// anywhere; it leaves the address at once, and lives as long as the tab.
"use strict";
(() => {
  const said = new URLSearchParams(location.hash.slice(1));
  if (said.has("token")) {
    sessionStorage.setItem("token", said.get("token"));
    said.delete("token");
    const left = said.toString();
    history.replaceState(null, "", left ? `#${left}` : location.pathname);
  }
  const asked = async (path, body) => {
    const headers = { Authorization: `Bearer ${sessionStorage.getItem("token") || ""}` };
    const how = body === undefined ? { headers } : { method: "POST", headers: { ...headers, "Content-Type": "application/json" }, body: JSON.stringify(body) };
    const answer = await fetch(path, how);
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.error);
    return found;
  };
  window.everystep = everystepPage(document.getElementById("page"), {
    links: true,
    document: () => asked("document"),
    steps: (run, from, count) => asked(`steps?run=${run}&from=${from}&count=${count}`),
    obey: (line, run, known) => asked("obey", { line, run, known }),
    halt: () => asked("halt", {}),
  });
})();
