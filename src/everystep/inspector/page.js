// Shows the record that lies in the page. Every text is made by textContent: nothing of a record is
// ever read as markup. There is no network, no storage, and no other file.
"use strict";
(() => {
  const PART = 2000; // tokens that are shown at once
  const MEASURES = ["surprise", "entropy", "rank"];
  const page = document.getElementById("page");
  const state = { run: 0, sequence: null, at: 0, measure: 0 };
  let record;

  const make = (tag, attributes = {}, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name === "text") node.textContent = value;
      else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else node.setAttribute(name, value);
    }
    node.append(...children);
    return node;
  };
  const spell = (id) => (id in record.texts ? record.texts[id] : `<${id}>`);
  const shown = (value) => (value === null ? "–" : String(Number(Number(value).toPrecision(4))));
  const percent = (value) => `${(value * 100).toFixed(2)} %`;
  const level = (surprise) =>
    surprise === null ? 0 : [0.5, 0.1, 0.01, 0.001].filter((s) => surprise > -Math.log(s)).length;

  const run = () => record.runs[state.run];
  const tokens = () => run().sequences[state.sequence] || [];
  const rowOf = (token) => (token[3] < 0 ? null : run().steps[token[3]].rows[token[4]]);
  const measured = (token) => {
    const row = rowOf(token);
    if (state.measure === 0) return token[1];
    if (row === null) return null;
    return state.measure === 1 ? row.entropies[0] : row.rank;
  };

  const choice = (label, values, chosen, act) => {
    const select = make("select", { onchange: () => act(select.selectedIndex) });
    values.forEach((value) => select.append(make("option", { text: value })));
    select.selectedIndex = chosen;
    return make("label", { text: `${label} ` }, select);
  };

  const controls = () => {
    const names = Object.keys(run().sequences);
    return make(
      "div",
      { class: "controls" },
      choice("Run", record.runs.map((one) => one.name), state.run, (i) => openRun(i)),
      choice("Sequence", names, names.indexOf(state.sequence), (i) => {
        state.sequence = names[i];
        state.at = 0;
        draw();
      }),
      choice("Strip", MEASURES, state.measure, (i) => {
        state.measure = i;
        draw();
      }),
      key(),
    );
  };

  const key = () => {
    const line = make("span", { class: "key", text: "share of the token: " });
    ["above 50 %", "10 %", "1 %", "0.1 %", "less"].forEach((name, i) =>
      line.append(make("span", { class: `s${i}`, text: name })),
    );
    ["given", "forced", "drafted"].forEach((name) =>
      line.append(make("span", { class: name, text: name })),
    );
    return line;
  };

  const textView = () => {
    const every = tokens();
    const first = Math.floor(state.at / PART) * PART;
    const list = make("div", {
      class: "tokens",
      id: "tokens",
      tabindex: "0",
      role: "listbox",
      "aria-label": "Tokens; arrow keys move, Home and End jump",
      "aria-activedescendant": `token-${state.at}`,
      onkeydown: (event) => moved(event),
      onclick: (event) => {
        const at = event.target.dataset.at;
        if (at !== undefined) go(Number(at));
      },
    });
    every.slice(first, first + PART).forEach((token, i) => {
      const at = first + i;
      const here = at === state.at;
      const kind = `s${level(token[1])} ${token[2]}${here ? " here" : ""}`;
      const said = { class: kind, id: `token-${at}`, role: "option", "data-at": at };
      list.append(make("span", { ...said, "aria-selected": here, text: spell(token[0]) }));
    });
    const part = every.length > PART ? `tokens ${first} to ${first + PART - 1} of ${every.length}` : "";
    return make("div", {}, list, make("div", { class: "quiet", text: part }));
  };

  const moved = (event) => {
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
    const last = tokens().length - 1;
    const to = { Home: 0, End: last, PageDown: state.at + PART, PageUp: state.at - PART };
    if (event.key in steps) go(state.at + steps[event.key]);
    else if (event.key in to) go(to[event.key]);
    else if (event.key === "m") {
      state.measure = (state.measure + 1) % MEASURES.length;
      draw();
    } else return;
    event.preventDefault();
  };

  const go = (at) => {
    state.at = Math.max(0, Math.min(at, tokens().length - 1));
    draw();
  };

  // The strip: the highest value of all tokens that share a pixel.
  const strip = () => {
    const values = tokens().map(measured);
    const most = values.reduce((a, b) => (b !== null && b > a ? b : a), 1e-9);
    const canvas = make("canvas", {
      role: "img",
      "aria-label": `${MEASURES[state.measure]} of every token, up to ${shown(most)}`,
      onclick: (event) => {
        const box = canvas.getBoundingClientRect();
        go(Math.floor(((event.clientX - box.left) / box.width) * values.length));
      },
    });
    const width = (canvas.width = Math.min(1200, Math.max(values.length, 1) * 12));
    const height = (canvas.height = 72);
    const pen = canvas.getContext("2d");
    const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
    const highest = new Array(width).fill(null);
    for (let x = 0; x < width; x += 1) {
      const from = Math.floor((x * values.length) / width);
      const to = Math.max(from + 1, Math.floor(((x + 1) * values.length) / width));
      for (let i = from; i < to && i < values.length; i += 1)
        if (values[i] !== null && (highest[x] === null || values[i] > highest[x])) highest[x] = values[i];
    }
    pen.fillStyle = colour("--quiet");
    highest.forEach((value, x) => {
      if (value !== null) pen.fillRect(x, height * (1 - value / most), 1, height);
    });
    pen.fillStyle = colour("--mark");
    const share = width / Math.max(values.length, 1);
    pen.fillRect(state.at * share, 0, Math.max(2, Math.min(share, 3)), height);
    return canvas;
  };

  const stepView = () => {
    const token = tokens()[state.at];
    const box = make("section", { id: "step", "aria-label": "The step of the token" });
    if (token === undefined) return box;
    box.append(make("h2", { text: `Token ${state.at}: ${spell(token[0])}` }));
    const row = rowOf(token);
    if (row === null) {
      const why = token[2] === "given" ? "It was given, not chosen." : "Its choice is not recorded.";
      box.append(make("p", { text: why }));
      return box;
    }
    const step = run().steps[token[3]];
    const [before, after] = row.entropies.map(shown);
    const rank = row.rank === null ? "" : `, rank ${row.rank} by the model's logits`;
    box.append(make("p", { text: `${token[2]}${rank}; entropy ${before} before the stages, ${after} after` }));
    if (row.draw !== null) box.append(drawView(row.draw));
    box.append(make("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Candidates" }, candidates(row)));
    const facts = row.ends.map(
      ([id, score, place]) => `end ${spell(id)}: rank ${place}, ${score === null ? "ruled out" : `score ${shown(score)}`}`,
    );
    step.drafts.forEach(([of, ids, right]) =>
      facts.push(`drafted after sequence ${of}: ${ids.map(spell).join("")}; the first ${right} were right`),
    );
    step.fed.forEach(([of, start, count]) =>
      facts.push(`sequence ${of} fed ${count} positions; ${start} came from a cache`),
    );
    const spent = Object.entries(step.seconds).map(([name, s]) => `${name} ${(s * 1000).toFixed(2)} ms`);
    facts.push(`step ${token[3]}: ${spent.join(", ")}; ${step.beside} other requests in it`);
    facts.forEach((fact) => box.append(make("div", { class: "quiet", text: fact })));
    return box;
  };

  const drawView = ([number, low, high]) => {
    const text = `drawn: ${number.toFixed(4)} lies in ${low.toFixed(4)} to ${high.toFixed(4)}`;
    const part = make("div", { class: "part" });
    const mark = make("div", { class: "number" });
    part.style.left = `${low * 100}%`;
    part.style.width = `${(high - low) * 100}%`;
    mark.style.left = `calc(${number * 100}% - 1px)`;
    return make("div", {}, make("div", { text }), make("div", { class: "draw", role: "img", "aria-label": text }, part, mark));
  };

  const candidates = (row) => {
    const last = row.stages.length ? row.stages[row.stages.length - 1][2] : row.logits;
    const value = (x) => (x === null ? -Infinity : x);
    const order = row.ids.map((_, i) => i);
    order.sort((a, b) => value(last[b]) - value(last[a]) || value(row.logits[b]) - value(row.logits[a]) || a - b);
    const head = make("tr", {}, make("th", { scope: "col", text: "id" }), make("th", { class: "text", scope: "col", text: "token" }));
    ["logit", ...row.stages.map((stage) => stage[0]), "share"].forEach((name) =>
      head.append(make("th", { scope: "col", text: name })),
    );
    const body = make("tbody");
    order.forEach((i) => {
      const own = row.ids[i] === row.chosen;
      const line = make("tr", own ? { class: "chosen", "aria-current": "true" } : {});
      line.append(make("td", { text: `${own ? "▸ " : ""}${row.ids[i]}` }), make("td", { class: "text", text: spell(row.ids[i]) }));
      const cells = [row.logits[i], ...row.stages.map((stage) => stage[2][i])];
      cells.forEach((score) => line.append(make("td", score === null ? { class: "gone", text: "–" } : { text: shown(score) })));
      const share = last[i] === null || row.totals[1] === null ? null : Math.exp(Math.min(last[i] - row.totals[1], 0));
      line.append(make("td", share === null ? { class: "gone", text: "ruled out" } : { text: percent(share) }));
      body.append(line);
    });
    const removed = make("tr", {}, make("td"), make("td", { class: "text", text: "ruled out of all" }), make("td"));
    row.stages.forEach((stage) => removed.append(make("td", { text: stage[1] || "" })));
    removed.append(make("td"));
    body.append(removed);
    const caption = make("caption", { text: "Candidates, best first; a column for what each stage left" });
    return make("table", {}, caption, make("thead", {}, head), body);
  };

  const prompt = () => {
    const list = make("div", { class: "prompt", tabindex: "0", role: "group", "aria-label": "The prompt as the model reads it" });
    run().prompt.slice(0, 5000).forEach((id, i) =>
      list.append(make("span", { title: `position ${run().first + i}, id ${id}`, text: spell(id) })),
    );
    const more = run().prompt.length - 5000;
    if (more > 0) list.append(make("span", { class: "quiet", text: ` and ${more} more ids` }));
    return list;
  };

  const draw = () => {
    const focused = document.activeElement && document.activeElement.id === "tokens";
    const scrolled = document.getElementById("tokens") ? document.getElementById("tokens").scrollTop : 0;
    const facts = make("dl");
    run().heading.forEach(([name, value]) => facts.append(make("dt", { text: name }), make("dd", { text: value })));
    const ends = make("div", { role: "status" });
    run().ends.forEach((line) => ends.append(make("div", { text: line })));
    page.replaceChildren(
      make("h1", { text: record.title }),
      controls(),
      textView(),
      strip(),
      ends,
      stepView(),
      make("h2", { text: "Hypotheses" }),
      make("pre", { id: "tree", tabindex: "0", role: "group", "aria-label": "Tree of hypotheses", text: run().tree.slice(0, 5000).join("\n") }),
      make("h2", { text: "Prompt, as the model reads it" }),
      prompt(),
      make("h2", { text: "What was asked" }),
      facts,
    );
    const list = document.getElementById("tokens");
    list.scrollTop = scrolled;
    if (focused) list.focus({ preventScroll: true });
    const here = document.getElementById(`token-${state.at}`);
    if (here && (here.offsetTop < list.offsetTop + list.scrollTop || here.offsetTop > list.offsetTop + list.scrollTop + list.clientHeight - 30))
      list.scrollTop = here.offsetTop - list.offsetTop - list.clientHeight / 2;
  };

  const openRun = (number) => {
    state.run = number;
    state.sequence = Object.keys(run().sequences)[0] || null;
    state.at = 0;
    draw();
  };

  const opened = async () => {
    const text = document.getElementById("record").textContent;
    const bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
    const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    record = await new Response(plain).json();
    if (record.runs.length) openRun(0);
    else document.getElementById("state").textContent = "The record holds no run yet.";
  };
  opened().catch((error) => {
    page.replaceChildren(make("p", { role: "alert", text: `The record cannot be shown: ${error.message}` }));
  });
})();
