// The page of a server. Every text is made by textContent: nothing that a model says is ever read
// as markup. Nothing is stored; the key is a variable of this tab.
"use strict";
(() => {
  const at = (id) => document.getElementById(id);
  const PERIOD = 2000; // milliseconds between two looks at the load
  const SAMPLING = ["", "sample", "best_of", "beam_sample"]; // that a temperature belongs to
  let key = "";
  let turns = []; // what the next request sends
  let going = null; // ends the answer that comes
  let before = null; // the load as it was told last
  let alone = false; // the engine is none of replicas

  const make = (tag, attributes, ...children) => {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  };

  // --- asking ------------------------------------------------------------------------------------

  const asked = async (path, more = {}) => {
    const own = key === "" ? {} : { Authorization: `Bearer ${key}` };
    const answer = await fetch(path, { ...more, headers: { ...own, ...more.headers } });
    if (answer.status === 401) {
      at("opening").hidden = false;
      throw new Error(key === "" ? "This server wants a key." : "The key is wrong.");
    }
    if (!answer.ok) {
      const told = await answer.json().catch(() => null);
      throw new Error(told && told.error ? told.error.message : `The server says ${answer.status}.`);
    }
    return answer;
  };

  async function* events(body) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  }

  // --- the conversation --------------------------------------------------------------------------

  const turn = (role, text) => {
    const said = make("p", { class: "said" }, text);
    const who = make("span", { class: "who" }, role === "user" ? "You" : "Model");
    const node = make("div", { class: `turn ${role}` }, who, said);
    at("talk").append(node);
    at("talk").scrollTop = at("talk").scrollHeight;
    return { node, said };
  };

  const thoughtOf = (shown) => {
    const thought = make("p", { class: "thought" });
    shown.said.before(make("details", {}, make("summary", {}, "Thought"), thought));
    return thought;
  };

  const number = (id) => (at(id).value.trim() === "" || at(id).disabled ? null : Number(at(id).value));

  const request = () => {
    const found = { messages: turns, stream: true, stream_options: { include_usage: true } };
    found.model = at("model").value || null;
    found.strategy = at("strategy").value || null;
    found.temperature = number("temperature");
    found.max_tokens = number("most");
    found.seed = number("seed");
    return found;
  };

  const answer = async () => {
    const shown = turn("assistant", "");
    const began = performance.now();
    let text = "", thought = null, whole = false, usage = null, reason = null;
    going = new AbortController();
    shown.node.classList.add("waiting");
    mark();
    try {
      const headers = { "Content-Type": "application/json" };
      const how = { method: "POST", headers, body: JSON.stringify(request()), signal: going.signal };
      const { body } = await asked("v1/chat/completions", how);
      for await (const line of events(body)) {
        if (line === "[DONE]") { whole = true; break; }
        const chunk = JSON.parse(line);
        if (chunk.error) throw new Error(chunk.error.message);
        usage = chunk.usage || usage;
        for (const choice of chunk.choices) {
          reason = choice.finish_reason || reason;
          const piece = choice.delta.content || "";
          if (choice.delta.reasoning_content) {
            thought = thought || thoughtOf(shown);
            thought.append(choice.delta.reasoning_content);
          }
          if (piece || choice.delta.reasoning_content) shown.node.classList.remove("waiting");
          text += piece;
          shown.said.append(piece);
          at("talk").scrollTop = at("talk").scrollHeight;
        }
      }
      if (!whole) throw new Error("The answer ended before its end.");
    } catch (error) {
      if (error.name !== "AbortError") at("error").textContent = error.message;
      reason = error.name === "AbortError" ? "stopped by you" : "broken off";
    }
    going = null;
    shown.node.classList.remove("waiting");
    mark();
    if (text === "" && !whole) { // nothing came: the question goes back to where it was written
      const last = turns.pop();
      shown.node.previousElementSibling.remove();
      shown.node.remove();
      if (at("text").value === "") at("text").value = last.content;
      return;
    }
    const seconds = (performance.now() - began) / 1000;
    const size = usage ? `${usage.completion_tokens} tokens in ${seconds.toFixed(1)} s, ` : "";
    shown.node.append(make("span", { class: "quiet" }, `${size}${reason}`));
    turns.push({ role: "assistant", content: text });
  };

  const mark = () => {
    at("send").disabled = going !== null;
    at("stop").disabled = going === null;
    at("temperature").disabled = !SAMPLING.includes(at("strategy").value);
  };

  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = at("text").value;
    if (going !== null || text.trim() === "") return;
    const wrong = ["temperature", "most", "seed"].map(at).find((one) => !one.checkValidity());
    if (wrong) {
      at("settings").open = true; // what is hidden cannot say what is wrong with it
      wrong.reportValidity();
      return;
    }
    at("error").textContent = "";
    at("text").value = "";
    turns.push({ role: "user", content: text });
    turn("user", text);
    answer();
  });
  at("text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    at("ask").requestSubmit();
  });
  at("stop").addEventListener("click", () => {
    if (going !== null) going.abort();
    at("text").focus();
  });
  at("fresh").addEventListener("click", () => {
    if (going !== null) going.abort();
    turns = [];
    at("talk").replaceChildren();
    at("error").textContent = "";
    at("text").focus();
  });
  at("strategy").addEventListener("change", mark);

  // --- models and load ---------------------------------------------------------------------------

  const models = async () => {
    const { data } = await (await asked("v1/models")).json();
    at("model").replaceChildren(...data.map((one) => make("option", {}, one.id)));
    at("models").replaceChildren(
      ...data.map((one) =>
        make(
          "tr",
          {},
          ...[one.id, one.max_model_len, one.parent].map((text) => make("td", {}, String(text ?? ""))),
          make("td", { class: "where", "data-model": one.parent ?? one.id }),
        ),
      ),
    );
  };

  const WHERE = { loaded: "loaded", leaving: "being put away", away: "put away", loading: "being loaded" };

  const places = (where) => {
    for (const cell of document.querySelectorAll("#models .where")) {
      cell.textContent = WHERE[where[cell.dataset.model]] || "";
    }
  };

  const span = (seconds) => {
    const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
    const [size, name] = units.find(([size]) => seconds >= 2 * size) || [1, "s"];
    return `${Math.floor(seconds / size)} ${name}`;
  };

  const cells = (one) => {
    const late = one.silent_seconds < 5 ? "" : `, silent for ${span(one.silent_seconds)}`;
    const models = Object.entries(one.models).map(([name, executor]) => `${name} on ${executor}`);
    const hits = one.prompt_tokens === 0 ? "" : `${((100 * one.cached_tokens) / one.prompt_tokens).toFixed(0)} %`;
    const numbers = [one.running, one.waiting, one.rows, one.generated_tokens];
    const where = make("th", { scope: "row" }, `${one.node}, ${one.process}${late}`);
    const others = [span(one.age_seconds), ...numbers, hits, one.engine_restarts, models.join(", ")];
    return [where, ...others.map((text) => make("td", {}, String(text)))];
  };

  const replicas = async () => {
    const told = await (await asked("v1/everystep/replicas")).json();
    alone = !told.has_replicas;
    at("replicas").hidden = alone;
    const died = told.replica_deaths === 0 ? "none" : String(told.replica_deaths);
    at("replicas-told").textContent = `${told.replicas} there, ${told.data.length} of them shown, ${died} died at work.`;
    at("states").replaceChildren(...told.data.map((one) => make("tr", {}, ...cells(one))));
  };

  const load = async () => {
    if (document.hidden || !at("opening").hidden) return;
    try {
      const now = await (await asked("v1/everystep/load")).json();
      const parts = [`${now.running} of ${now.rows} running`, `${now.waiting} waiting`];
      if (before !== null && now.seconds > before.seconds && now.generated_tokens >= before.generated_tokens) {
        const rate = (now.generated_tokens - before.generated_tokens) / (now.seconds - before.seconds);
        parts.push(`${rate.toFixed(0)} tokens/s`);
      }
      before = now;
      at("load").textContent = now.ready ? parts.join(", ") : "The engine is being started.";
      if (now.ready && at("models").childElementCount === 0) await models();
      places(now.models);
      if (now.ready && !alone) await replicas();
    } catch (error) {
      at("load").textContent = error.message;
    }
  };

  at("opening").addEventListener("submit", (event) => {
    event.preventDefault();
    key = at("key").value;
    at("key").value = "";
    at("opening").hidden = true;
    at("error").textContent = "";
    load();
    at("text").focus();
  });
  mark();
  load();
  setInterval(load, PERIOD);
})();
