// The page in a cell of a notebook: what it asks goes to the kernel, and comes back by number.
export default {
  render({ model, el }) {
    const waiting = new Map();
    let serial = 0;
    const heard = (message) => {
      const asked = waiting.get(message.id);
      if (asked === undefined) return;
      waiting.delete(message.id);
      if (message.error === undefined) asked.resolve(message.value);
      else asked.reject(new Error(message.error));
    };
    model.on("msg:custom", heard);
    const ask = (what, given = {}) =>
      new Promise((resolve, reject) => {
        serial += 1;
        waiting.set(serial, { resolve, reject });
        model.send({ id: serial, what, ...given });
      });
    const root = document.createElement("div");
    el.classList.add("everystep");
    el.append(root);
    everystepPage(root, {
      links: false,
      document: () => ask("document"),
      steps: (run, first, count) => ask("steps", { run, first, count }),
      obey: (line, run, known) => ask("obey", { line, run, known }),
      halt: () => ask("halt"),
    });
    return () => model.off("msg:custom", heard);
  },
};
