// Shows records in an element. Every text is made by textContent: nothing of a record is ever read
// as markup. `source` gives the document, and where there is a server or a kernel behind it, steps
// by window and what verbs answer. There is no storage here, no network, and no other file.
function everystepPage(root, source) {
  "use strict";
  const PART = 500; // tokens that are shown at once
  const WINDOW = 100; // steps that are asked for at once
  const COLUMNS = 1200; // of the strip, at most
  const PROMPT = 5000; // ids of the prompt that are shown
  const MEASURES = ["surprise", "entropy", "rank", "milliseconds"];
  const QUESTIONS = [
    ["without", "without a processor", "TopK"],
    ["seed", "another seed", "7"],
    ["temperature", "another temperature", "0.5"],
    ["adapter", "another adapter", "name"],
    ["mask", "a part of the prompt masked", "2:5"],
    ["why", "needed for a token", "id, #rank or \"text\""],
    ["prompt", "which part of the prompt mattered", ""],
    ["lens", "inside: a lens per layer", ""],
    ["attention", "inside: what each head looked at", ""],
  ];
  const state = { run: 0, sequence: null, at: 0, measure: 0, part: -1, busy: false };
  const windows = new Map(); // steps that were asked for, by run and window
  const places = {}; // the elements that are drawn again
  // What was asked for and made so far.
  const counts = { windows: 0, spans: 0, bars: 0, columns: 0, rows: 0, grown: 0 };
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
  const button = (text, act, more = {}) => make("button", { type: "button", text, onclick: act, ...more });
  const run = () => record.runs[state.run];
  const textsOf = (one) => record.texts[one.record];
  const spell = (id) => (id in textsOf(run()) ? textsOf(run())[id] : `<${id}>`);
  const shown = (value) => (value === null ? "–" : String(Number(Number(value).toPrecision(4))));
  const percent = (value) => `${(value * 100).toFixed(2)} %`;
  const level = (surprise) =>
    surprise === null ? 0 : [0.5, 0.1, 0.01, 0.001].filter((s) => surprise > -Math.log(s)).length;
  const tokens = () => run().sequences[state.sequence] || [];
  const measured = (token) => token[[1, 6, 7, 8][state.measure]];

  // --- steps, at once or by window ---------------------------------------------------------------

  const stepOf = (token) => {
    if (token === undefined || token[3] < 0) return null;
    const owner = record.runs[token[5]];
    if (Array.isArray(owner.steps)) return owner.steps[token[3]];
    const number = Math.floor(token[3] / WINDOW);
    const name = `${token[5]}/${number}`;
    const held = windows.get(name);
    if (held !== undefined && token[3] - number * WINDOW < held.length) return held[token[3] - number * WINDOW];
    if (held === undefined || !held.asked) {
      const waiting = Object.assign([], { asked: true });
      windows.set(name, waiting);
      counts.windows += 1;
      source.steps(token[5], number * WINDOW, WINDOW).then((steps) => {
        windows.set(name, steps);
        drawStep();
      }, failed);
    }
    return undefined; // not here yet
  };

  // --- what stands above -------------------------------------------------------------------------

  const choice = (label, id, values, chosen, act) => {
    const select = make("select", { id, onchange: () => act(select.selectedIndex) });
    values.forEach((value) => select.append(make("option", { text: value })));
    select.selectedIndex = chosen;
    return make("label", { text: `${label} ` }, select);
  };

  const controls = () => {
    const names = Object.keys(run().sequences);
    const strip = choice("Strip", "strip", MEASURES, state.measure, (i) => {
      state.measure = i;
      drawStrip();
    });
    places.measure = strip.querySelector("select");
    return make(
      "div",
      { class: "controls" },
      choice("Run", "run", record.runs.map((one) => one.name), state.run, (i) => openRun(i)),
      choice("Sequence", "sequence", names, names.indexOf(state.sequence), (i) => openRun(state.run, names[i])),
      strip,
      key(),
    );
  };

  const key = () => {
    const line = make("span", { class: "key", text: "share of the token: " });
    ["above 50 %", "10 %", "1 %", "0.1 %", "less"].forEach((name, i) =>
      line.append(make("span", { class: `s${i}`, text: name })),
    );
    ["given", "forced", "drafted"].forEach((name) => line.append(make("span", { class: name, text: name })));
    return line;
  };

  // --- the text ----------------------------------------------------------------------------------

  const textView = () => {
    places.tokens = make("div", {
      class: "tokens",
      id: "tokens",
      tabindex: "0",
      role: "listbox",
      "aria-label": "Tokens; arrow keys move, Home and End jump, m measures, b next low share, c candidates, / finds",
      onkeydown: (event) => moved(event),
      onclick: (event) => {
        const at = event.target.dataset.at;
        if (at !== undefined) go(Number(at));
      },
    });
    places.part = make("div", { class: "quiet" });
    state.part = -1;
    places.here = undefined;
    return make("div", {}, places.tokens, places.part);
  };

  const drawText = () => {
    const every = tokens();
    const part = Math.floor(state.at / PART);
    const first = part * PART;
    if (part !== state.part) places.tokens.replaceChildren();
    const there = places.tokens.children.length; // of a run that grows, the others are to come
    if (part !== state.part || first + there < Math.min(first + PART, every.length)) {
      state.part = part;
      const own = every.slice(first + there, first + PART).map((token, i) => {
        const kind = `s${level(token[1])} ${token[2]}`;
        const at = first + there + i;
        return make("span", { class: kind, id: `token-${at}`, role: "option", "data-at": at, "aria-selected": "false", text: spell(token[0]) });
      });
      places.tokens.append(...own);
      counts.spans += own.length;
      const last = Math.min(first + PART, every.length) - 1;
      places.part.textContent = every.length > PART ? `tokens ${first} to ${last} of ${every.length}` : "";
    }
    if (places.here) {
      places.here.classList.remove("here");
      places.here.setAttribute("aria-selected", "false");
    }
    const here = places.tokens.children[state.at - first];
    places.here = here;
    if (here === undefined) {
      places.tokens.removeAttribute("aria-activedescendant");
      return;
    }
    here.classList.add("here");
    here.setAttribute("aria-selected", "true");
    places.tokens.setAttribute("aria-activedescendant", here.id);
    const list = places.tokens;
    const top = here.offsetTop - list.offsetTop;
    if (top < list.scrollTop || top > list.scrollTop + list.clientHeight - 30) list.scrollTop = top - list.clientHeight / 2;
  };

  const moved = (event) => {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
    const last = tokens().length - 1;
    const to = { Home: 0, End: last, PageDown: state.at + PART, PageUp: state.at - PART };
    const acts = {
      m: () => {
        state.measure = (state.measure + 1) % MEASURES.length;
        places.measure.selectedIndex = state.measure;
        drawStrip();
      },
      b: () => low(),
      c: () => places.step.querySelector(".wide") && places.step.querySelector(".wide").focus(),
      "/": () => places.find.focus(),
    };
    if (record.live) Object.assign(acts, { s: () => obey("step"), u: () => obey("undo"), f: () => obey("fork") });
    if (event.key in steps) go(state.at + steps[event.key]);
    else if (event.key in to) go(to[event.key]);
    else if (event.key in acts) acts[event.key]();
    else return;
    event.preventDefault();
  };

  const go = (at) => {
    state.at = Math.max(0, Math.min(at, tokens().length - 1));
    drawText();
    drawStrip();
    drawStep();
    link();
  };

  const address = () => `#run=${encodeURIComponent(run().name)}&sequence=${state.sequence}&at=${state.at}`;
  const link = () => {
    if (source.links) history.replaceState(null, "", address());
  };

  // --- find and copy -----------------------------------------------------------------------------

  const finding = () => {
    places.found = make("span", { role: "status", id: "found", class: "quiet" });
    places.find = make("input", {
      type: "search",
      id: "find",
      onkeydown: (event) => {
        if (event.key === "Enter") find(event.shiftKey ? -1 : 1);
        else if (event.key === "Escape") places.tokens.focus();
        else return;
        event.preventDefault();
      },
    });
    return make(
      "div",
      { class: "controls" },
      make("label", { text: "Find a text or #id " }, places.find),
      places.found,
      button("Lowest share", () => extreme(1), { id: "lowest" }),
      button("Highest entropy", () => extreme(6), { id: "unsure" }),
      button("Repetition", repetition, { id: "repetition" }),
      button("Copy as text", copy, { id: "copy" }),
    );
  };

  const find = (way) => {
    const wanted = places.find.value.replaceAll(" ", "·");
    const hits = [];
    if (/^#\d+$/.test(wanted)) tokens().forEach((token, at) => token[0] === Number(wanted.slice(1)) && hits.push(at));
    else if (wanted) {
      const starts = [];
      let text = "";
      tokens().forEach((token) => {
        starts.push(text.length);
        text += spell(token[0]);
      });
      let place = 0;
      for (let at = text.indexOf(wanted); at >= 0; at = text.indexOf(wanted, at + 1)) {
        while (place + 1 < starts.length && starts[place + 1] <= at) place += 1;
        if (hits[hits.length - 1] !== place) hits.push(place);
      }
    }
    const after = hits.filter((at) => (way > 0 ? at > state.at : at < state.at));
    const next = way > 0 ? (after.length ? after[0] : hits[0]) : after.length ? after[after.length - 1] : hits[hits.length - 1];
    places.found.textContent = hits.length ? `${hits.indexOf(next) + 1} of ${hits.length}: token ${next}` : "not found";
    if (next !== undefined) go(next);
  };

  const extreme = (field) => {
    let best = -1;
    tokens().forEach((token, at) => {
      if (token[field] !== null && (best < 0 || token[field] > tokens()[best][field])) best = at;
    });
    places.found.textContent = best < 0 ? "nothing was chosen" : `token ${best}`;
    if (best >= 0) go(best);
  };

  // The next token that the model gave less than a tenth, as `b` finds it in a terminal.
  const low = () => {
    const at = tokens().findIndex((token, i) => i > state.at && level(token[1]) >= 2);
    places.found.textContent = at < 0 ? "no token below 10 % follows" : `token ${at}`;
    if (at >= 0) go(at);
  };

  // The longest run of ids that stands there twice, and where it does first.
  const repetition = () => {
    const ids = tokens().map((token) => token[0]);
    let best = null;
    for (let size = Math.min(32, Math.floor(ids.length / 2)); size > 1 && best === null; size -= 1) {
      const seen = new Map();
      for (let at = 0; at + size <= ids.length; at += 1) {
        const name = ids.slice(at, at + size).join(",");
        if (seen.has(name) && at >= seen.get(name) + size) {
          best = [size, seen.get(name), at, name];
          break;
        }
        if (!seen.has(name)) seen.set(name, at);
      }
    }
    if (best === null) {
      places.found.textContent = "nothing repeats";
      return;
    }
    const [size, first, again] = best;
    let count = 0;
    for (let at = 0; at + size <= ids.length; at += 1) {
      if (ids.slice(at, at + size).join(",") === best[3]) {
        count += 1;
        at += size - 1;
      }
    }
    const text = ids.slice(first, first + size).map(spell).join("");
    places.found.textContent = `${size} tokens stand there ${count} times, first at ${first}, again at ${again}: ${text}`;
    go(again);
  };

  const asText = () => {
    const lines = [`### ${record.title}, run ${run().name}, sequence ${state.sequence}, token ${state.at}`, ""];
    run().heading.forEach(([name, value]) => lines.push(`- ${name}: \`${value.replaceAll("`", "'")}\``));
    const around = tokens().slice(Math.max(0, state.at - 20), state.at + 6);
    lines.push("", `text: \`${around.map((token) => spell(token[0])).join("").replaceAll("`", "'")}\``, "");
    const cell = (node) => node.textContent.replaceAll("|", "\\|").replaceAll("`", "'");
    places.step.querySelectorAll("h2, p, .quiet, .said").forEach((one) => lines.push(one.textContent));
    places.step.querySelectorAll("table").forEach((table) => {
      lines.push("");
      [...table.rows].forEach((row, i) => {
        lines.push(`| ${[...row.cells].map(cell).join(" | ")} |`);
        if (i === 0) lines.push(`|${[...row.cells].map(() => " --- ").join("|")}|`);
      });
    });
    run().ends.forEach((line) => lines.push("", line));
    return lines.join("\n");
  };

  const copy = () => {
    places.copied.hidden = false;
    places.copied.value = asText();
    places.copied.focus();
    places.copied.select();
    if (navigator.clipboard) navigator.clipboard.writeText(places.copied.value).catch(() => {});
  };

  // --- the strip: the highest value of all tokens that share a pixel -----------------------------

  const stripView = () => {
    places.strip = make("canvas", {
      role: "img",
      onclick: (event) => {
        const box = places.strip.getBoundingClientRect();
        const column = (((event.clientX - box.left) / box.width) * places.strip.width) / places.unit;
        go(Math.floor(column * bars().per));
      },
    });
    return places.strip;
  };

  // A column has the highest value of as many tokens as all columns, so tokens that come to a text
  // change the last ones alone, until there are too many.
  const bars = () => {
    const own = tokens();
    const held = places.bars;
    const same = held && held.of === own && held.measure === state.measure && held.count <= own.length;
    if (!same || own.length > held.per * COLUMNS) {
      const per = Math.max(1, Math.ceil(own.length / COLUMNS));
      counts.bars += 1;
      places.bars = { of: own, measure: state.measure, per, count: 0, highest: [], most: 1e-9, fresh: 0 };
    }
    const made = places.bars;
    for (; made.count < own.length; made.count += 1) {
      const value = measured(own[made.count]);
      const column = Math.floor(made.count / made.per);
      const before = made.highest[column] ?? null;
      made.highest[column] = value === null ? before : Math.max(value, before ?? value);
      made.fresh = Math.min(made.fresh, column);
      if (value !== null && value > made.most) Object.assign(made, { most: value, fresh: 0 });
    }
    return made;
  };

  // All columns, where the canvas is new or another one is the highest; else those that changed,
  // and those below the mark.
  const drawStrip = () => {
    const made = bars();
    const { highest, most } = made;
    const canvas = places.strip;
    const unit = Math.max(1, Math.min(12, Math.floor(COLUMNS / Math.max(highest.length, 1))));
    const room = highest.length > 200 ? 32 : 1; // columns to come, before which nothing moves
    const width = Math.max(Math.ceil(highest.length / room) * room, 1) * unit;
    const height = 72;
    canvas.setAttribute("aria-label", `${MEASURES[state.measure]} of every token, up to ${shown(most)}`);
    const whole = made.canvas !== canvas || canvas.width !== width || made.fresh === 0;
    if (whole) {
      const colour = (name) => getComputedStyle(root).getPropertyValue(name);
      Object.assign(canvas, { width, height });
      places.unit = unit;
      Object.assign(made, { canvas, quiet: colour("--quiet"), mark: colour("--mark") });
    }
    const pen = canvas.getContext("2d");
    const columns = (first, end) => {
      pen.clearRect(first * unit, 0, (end - first) * unit, height);
      pen.fillStyle = made.quiet;
      for (let x = first; x < end; x += 1) {
        counts.columns += 1;
        const value = highest[x] ?? null;
        if (value !== null) pen.fillRect(x * unit, height * (1 - value / most), unit, height);
      }
    };
    if (!whole) columns(...made.marked);
    if (whole || made.fresh < highest.length) columns(whole ? 0 : made.fresh, highest.length);
    made.fresh = highest.length;
    const at = Math.floor(state.at / made.per) * unit;
    const wide = Math.max(2, Math.min(unit, 3));
    pen.fillStyle = made.mark;
    pen.fillRect(at, 0, wide, height);
    made.marked = [at / unit, Math.ceil((at + wide) / unit)];
  };

  // --- the step ----------------------------------------------------------------------------------

  const drawStep = () => {
    const token = tokens()[state.at];
    const box = places.step;
    const focused = box.contains(document.activeElement);
    box.replaceChildren();
    if (token === undefined) return;
    box.append(make("h2", { text: `Token ${state.at}: ${spell(token[0])}` }));
    const step = stepOf(token);
    if (!step) {
      const gone = token[2] === "given" ? "It was given, not chosen." : "Its choice is not recorded.";
      box.append(make("p", { text: step === undefined ? "The step is being read." : gone }));
      return;
    }
    const row = step.rows[token[4]];
    const [before, after] = row.entropies.map(shown);
    const rank = row.rank === null ? "" : `, rank ${row.rank} by the model's logits`;
    box.append(make("p", { text: `${token[2]}${rank}; entropy ${before} before the stages, ${after} after` }));
    box.append(make("p", { text: margin(row) }));
    if (row.draw !== null) box.append(drawView(row.draw));
    box.append(make("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Candidates" }, candidates(row)));
    facts(token, step, row).forEach((fact) => box.append(make("div", { class: "quiet", text: fact })));
    if (focused) box.querySelector(".wide").focus({ preventScroll: true });
  };

  const margin = (row) => {
    const last = row.stages.length ? row.stages[row.stages.length - 1][2] : row.logits;
    const own = last[row.ids.indexOf(row.chosen)];
    const others = last.filter((value, i) => value !== null && row.ids[i] !== row.chosen);
    if (own === undefined || own === null || !others.length) return "no other token was possible";
    const best = Math.max(...others);
    const ahead = own - best;
    const tie = Math.abs(ahead) < 1e-4 ? ", a tie" : "";
    return ahead >= 0 ? `ahead of the next best by ${shown(ahead)}${tie}` : `behind the best by ${shown(-ahead)}${tie}`;
  };

  const facts = (token, step, row) => {
    const found = row.ends.map(
      ([id, score, place]) => `end ${spell(id)}: rank ${place}, ${score === null ? "ruled out" : `score ${shown(score)}`}`,
    );
    step.drafts.forEach(([of, ids, right, instead]) => {
      const failed = right < ids.length && instead !== null ? `; then ${spell(instead)} in place of ${spell(ids[right])}` : "";
      found.push(`drafted after sequence ${of}: ${ids.map(spell).join("")}; the first ${right} were right${failed}`);
    });
    step.lost.forEach(([of, id, score, least]) =>
      found.push(`not kept: ${spell(id)} after sequence ${of}, score ${shown(score)}; the worst that was kept has ${shown(least)}`),
    );
    found.push(...step.fed);
    const late = (run().unseen[state.sequence] || {})[state.at];
    found.push(late === undefined ? "a reader of the stream had all of it after this step" : `a reader of the stream did not have yet: ${late}`);
    const spent = Object.entries(step.seconds).map(([name, s]) => `${name} ${(s * 1000).toFixed(2)} ms`);
    found.push(`step ${token[3]}: ${spent.join(", ")}; ${step.beside} other requests in it`);
    return found;
  };

  const drawView = ([number, low, high]) => {
    const text = `drawn: ${number.toFixed(4)} lies in ${low.toFixed(4)} to ${high.toFixed(4)}`;
    const part = make("div", { class: "part" });
    const mark = make("div", { class: "number" });
    part.style.left = `${low * 100}%`;
    part.style.width = `${(high - low) * 100}%`;
    mark.style.left = `calc(${number * 100}% - 1px)`;
    return make("div", {}, make("div", { class: "said", text }), make("div", { class: "draw", role: "img", "aria-label": text }, part, mark));
  };

  const candidates = (row) => {
    const picks = record.live && record.live.alone;
    const last = row.stages.length ? row.stages[row.stages.length - 1][2] : row.logits;
    const value = (x) => (x === null ? -Infinity : x);
    const order = row.ids.map((_, i) => i);
    order.sort((a, b) => value(last[b]) - value(last[a]) || value(row.logits[b]) - value(row.logits[a]) || a - b);
    const head = make("tr", {}, make("th", { scope: "col", text: "id" }), make("th", { class: "text", scope: "col", text: "token" }));
    ["logit", ...row.stages.map((stage) => stage[0]), "share", ...(picks ? ["pick"] : [])].forEach((name) =>
      head.append(make("th", { scope: "col", text: name })),
    );
    const body = make("tbody");
    counts.rows += order.length;
    order.forEach((i) => {
      const own = row.ids[i] === row.chosen;
      const line = make("tr", own ? { class: "chosen", "aria-current": "true" } : {});
      line.append(make("td", { text: `${own ? "▸ " : ""}${row.ids[i]}` }), make("td", { class: "text", text: spell(row.ids[i]) }));
      const cells = [row.logits[i], ...row.stages.map((stage) => stage[2][i])];
      cells.forEach((score) => line.append(make("td", score === null ? { class: "gone", text: "–" } : { text: shown(score) })));
      const share = last[i] === null || row.totals[1] === null ? null : Math.exp(Math.min(last[i] - row.totals[1], 0));
      line.append(make("td", share === null ? { class: "gone", text: "ruled out" } : { text: percent(share) }));
      const label = `pick ${spell(row.ids[i])} here`;
      if (picks) line.append(make("td", {}, button("pick", () => obey(`pick ${row.ids[i]} ${state.at}`), { "aria-label": label, "data-id": row.ids[i] })));
      body.append(line);
    });
    const removed = make("tr", {}, make("td"), make("td", { class: "text", text: "ruled out of all" }), make("td"));
    row.stages.forEach((stage) => removed.append(make("td", { text: stage[1] || "" })));
    removed.append(make("td"), ...(picks ? [make("td")] : []));
    body.append(removed);
    const caption = make("caption", { text: "Candidates, best first; a column for what each stage left" });
    return make("table", {}, caption, make("thead", {}, head), body);
  };

  // --- verbs: a run in hands, and questions to a model -------------------------------------------

  const typed = (label, id, hint, act) => {
    const input = make("input", {
      id,
      placeholder: hint,
      onkeydown: (event) => {
        if (event.key !== "Enter") return;
        event.preventDefault();
        act(input.value);
      },
    });
    return make("label", { text: `${label} ` }, input);
  };

  const hands = () => {
    const box = make("section", { id: "hands", "aria-label": "The run in your hands" });
    if (!record.live) return box;
    const line = (...parts) => box.append(make("div", { class: "controls" }, ...parts));
    box.append(make("h2", { text: "In your hands" }));
    line(
      button("Step", () => obey("step"), { id: "do-step" }),
      button("To the end", () => obey("until done"), { id: "do-end" }),
      button("To a low share", () => obey("until low"), { id: "do-low" }),
      button("To a near end", () => obey("until stop"), { id: "do-stop" }),
      typed("To token", "do-until", "position", (text) => obey(`until ${text}`)),
      button("Undo", () => obey("undo"), { id: "do-undo" }),
      button("Fork", () => obey("fork"), { id: "do-fork" }),
      button("Halt", () => source.halt(), { id: "do-halt" }),
    );
    line(
      typed("Send", "do-send", "text", (text) => obey(`send ${JSON.stringify(text)}`)),
      typed("Edit from here", "do-edit", "text", (text) => obey(`edit ${state.at} ${JSON.stringify(text)}`)),
      typed("Set", "do-set", "temperature=0.5", (text) => obey(`set ${text}`)),
    );
    return box;
  };

  const questions = () => {
    const box = make("section", { id: "what", "aria-label": "What if" });
    if (!record.asks) return box;
    const kind = make("select", { id: "what-kind", "aria-label": "What is otherwise" });
    QUESTIONS.forEach(([, text]) => kind.append(make("option", { text })));
    const value = make("input", { id: "what-value", "aria-label": "Its value", placeholder: QUESTIONS[0][2] });
    kind.addEventListener("change", () => value.setAttribute("placeholder", QUESTIONS[kind.selectedIndex][2]));
    const ask = () => {
      const name = QUESTIONS[kind.selectedIndex][0];
      if (name === "why") obey(`why ${value.value} ${state.at}`);
      else if (name === "prompt") obey("prompt");
      else if (name === "lens" || name === "attention") obey(`${name} ${state.at} ${state.sequence}`);
      else obey(`if ${name}=${value.value} at ${state.at}`);
    };
    value.addEventListener("keydown", (event) => event.key === "Enter" && ask());
    box.append(
      make("h2", { text: "What if, from this token on" }),
      make("div", { class: "controls" }, kind, value, button("Ask", ask, { id: "what-ask" })),
    );
    return box;
  };

  const obey = (line) => {
    if (state.busy) return;
    state.busy = true;
    root.setAttribute("aria-busy", "true");
    places.said.textContent = "Working.";
    const focused = document.activeElement && document.activeElement.id;
    const known = [tokens().length, Object.keys(textsOf(run())).length];
    source.obey(line, run().name, known).then(
      (answer) => {
        state.busy = false;
        root.removeAttribute("aria-busy");
        if (answer.document) renew(answer.document, answer.follows);
        else if (answer.grown) grow(answer.grown);
        places.said.textContent = answer.said.join("\n");
        const back = focused && root.querySelector(`#${CSS.escape(focused)}`);
        if (back) back.focus({ preventScroll: true });
        else if (answer.document || answer.grown) places.tokens.focus({ preventScroll: true });
      },
      (error) => {
        state.busy = false;
        root.removeAttribute("aria-busy");
        places.said.textContent = error.message;
      },
    );
  };

  // Another document of the same records: steps that are here stay, those that came are asked for.
  const renew = (found, follows) => {
    const held = run().name;
    record = found;
    forget();
    const name = follows === undefined ? held : follows;
    const number = Math.max(0, record.runs.findIndex((one) => one.name === name));
    const keeps = follows === undefined;
    openRun(number, keeps ? state.sequence : null, keeps ? state.at : Infinity);
  };

  // Windows that were not full: more steps may stand there now.
  const forget = () => {
    for (const [name, steps] of [...windows]) if (steps.length < WINDOW) windows.delete(name);
  };

  // What came to the run that is shown, of which the rest is here and stays.
  const grow = (found) => {
    const own = record.runs[found.run];
    Object.assign(textsOf(own), found.texts);
    own.sequences[state.sequence].length = found.from;
    own.sequences[state.sequence].push(...found.tokens);
    Object.assign((own.unseen[state.sequence] ||= {}), found.unseen);
    forget();
    counts.grown += found.tokens.length;
    if (places.bars && places.bars.count > found.from) places.bars = undefined;
    places.older.hidden = false;
    go(Infinity);
  };

  // --- comparison --------------------------------------------------------------------------------

  const comparison = () => {
    const box = make("section", { id: "comparison", "aria-label": "Comparison of two records" });
    if (!record.comparison) return box;
    box.append(make("h2", { text: "The two records, aligned at the first difference" }));
    box.append(make("pre", { tabindex: "0", role: "group", "aria-label": "What differs", text: record.comparison.lines.join("\n") }));
    record.comparison.pairs.forEach(({ one, other, at }) => {
      const body = make("tbody");
      const sides = [record.runs[one], record.runs[other]];
      const rows = sides.map((side) => side.sequences[Object.keys(side.sequences)[0]] || []);
      const end = Math.min(at + 20, Math.max(rows[0].length, rows[1].length));
      for (let i = Math.max(0, at - 5); i < end; i += 1) {
        const line = make("tr", i === at ? { class: "chosen", "aria-current": "true" } : {});
        line.append(make("th", { scope: "row", text: i }));
        sides.forEach((side, which) => {
          const token = rows[which][i];
          const cell = make("td", { class: "text" });
          if (token) {
            const text = textsOf(side)[token[0]] || `<${token[0]}>`;
            cell.append(button(text, () => openRun(which ? other : one, null, i), { "aria-label": `show token ${i} of ${side.name}: ${text}` }));
            if (token[1] !== null) cell.append(` ${percent(Math.exp(-token[1]))}`);
          }
          line.append(cell);
        });
        body.append(line);
      }
      const head = make("tr", {}, make("th", { scope: "col", text: "at" }), ...sides.map((side) => make("th", { class: "text", scope: "col", text: side.name })));
      box.append(make("div", { class: "wide", tabindex: "0", role: "group", "aria-label": "Tokens side by side" }, make("table", {}, make("thead", {}, head), body)));
    });
    return box;
  };

  // --- all of it ---------------------------------------------------------------------------------

  const prompt = () => {
    const list = make("div", { class: "prompt", tabindex: "0", role: "group", "aria-label": "The prompt as the model reads it" });
    run().prompt.slice(0, PROMPT).forEach((id, i) =>
      list.append(make("span", { title: `position ${run().first + i}, id ${id}`, text: spell(id) })),
    );
    const more = run().prompt.length - PROMPT;
    if (more > 0) list.append(make("span", { class: "quiet", text: ` and ${more} more ids` }));
    return list;
  };

  // Of a long run that grows, hypotheses and ends are as they were when all of it was drawn.
  const older = () => {
    const again = button("Draw again", () => source.document().then((found) => renew(found), failed), { id: "again" });
    places.older = make("div", { id: "older", hidden: "" }, `The tree and the nearest end are those of ${tokens().length} tokens. `, again);
    return places.older;
  };

  const openRun = (number, sequence = null, at = 0) => {
    state.run = number;
    const names = Object.keys(run().sequences);
    state.sequence = names.includes(sequence) ? sequence : names[0] || null;
    const said = places.said ? places.said.textContent : "";
    const inside = root.contains(document.activeElement);
    const focused = inside && document.activeElement.id;
    const asked = ["what-kind", "what-value"].map((id) => {
      const one = root.querySelector(`#${id}`);
      return one && one.value;
    });
    const details = make("dl");
    run().heading.forEach(([name, value]) => details.append(make("dt", { text: name }), make("dd", { text: value })));
    const ends = make("div", { role: "status", id: "ends" });
    run().ends.forEach((line) => ends.append(make("div", { text: line })));
    places.step = make("section", { id: "step", "aria-label": "The step of the token" });
    places.said = make("pre", { id: "said", role: "status", tabindex: "0", "aria-label": "What came of it", text: said });
    places.copied = make("textarea", { id: "copied", rows: "12", readonly: "", "aria-label": "The step as text for an issue", hidden: "" });
    root.replaceChildren(
      make("h1", { text: record.title }),
      controls(),
      textView(),
      stripView(),
      finding(),
      places.copied,
      ends,
      hands(),
      ...(record.live || record.asks ? [places.said] : []),
      places.step,
      questions(),
      comparison(),
      make("h2", { text: "Hypotheses, forks and drafts" }),
      older(),
      make("pre", { id: "tree", tabindex: "0", role: "group", "aria-label": "Tree of hypotheses", text: run().tree.slice(0, 5000).join("\n") }),
      make("h2", { text: "Prompt, as the model reads it" }),
      prompt(),
      make("h2", { text: "What was asked" }),
      details,
    );
    ["what-kind", "what-value"].forEach((id, i) => {
      const one = root.querySelector(`#${id}`);
      if (one && asked[i]) one.value = asked[i];
    });
    const back = focused && root.querySelector(`#${CSS.escape(focused)}`);
    if (inside) (back || places.tokens).focus({ preventScroll: true });
    go(at);
  };

  const failed = (error) => {
    root.replaceChildren(make("p", { role: "alert", text: `The record cannot be shown: ${error.message}` }));
  };

  // Where an address says which run and token, that is shown first.
  const opened = (found) => {
    record = found;
    if (!record.runs.length) {
      root.replaceChildren(make("p", { role: "status", text: "The record holds no run yet." }));
      return;
    }
    const said = new URLSearchParams(source.links ? location.hash.slice(1) : "");
    const number = record.runs.findIndex((one) => one.name === said.get("run"));
    const live = record.live ? record.runs.findIndex((one) => one.name === record.live.current) : 0;
    const at = Number(said.get("at"));
    openRun(number < 0 ? Math.max(live, 0) : number, said.get("sequence"), Number.isInteger(at) ? at : 0);
  };

  source.document().then(opened).catch(failed);
  return { renew, go, counts };
}
