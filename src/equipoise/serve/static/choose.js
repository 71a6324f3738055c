// Tries all models of a family on a client's own examples, in this browser. Only models are fetched; examples stay here.
"use strict";
(() => {
  const holder = document.getElementById("choose-data");
  if (!holder) return;
  const family = JSON.parse(holder.textContent), find = (id) => document.getElementById(id), { write } = EquipoiseCharts;
  const { signature, members } = family, ROWS = 512;
  let runtime = null, sessions = null;

  const say = (text) => { find("choose-status").textContent = text; };

  async function start() {
    if (sessions) return sessions;
    say("Fetching the models …");
    runtime = await import(family.runtime.script);
    const at = (path) => new URL(path, location.href).href;
    Object.assign(runtime.env.wasm, { numThreads: 1, proxy: false, wasmPaths: { mjs: at(family.runtime.mjs), wasm: at(family.runtime.wasm) } });
    const made = [];
    for (const member of members) {
      const answer = await fetch(member.score);
      if (!answer.ok) throw new EquipoiseOwnData.Problem(`The model ${member.name} could not be fetched (${answer.status}). Load this page again.`);
      const content = await answer.arrayBuffer();
      if (crypto.subtle) {
        const digest = [...new Uint8Array(await crypto.subtle.digest("SHA-256", content))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
        if (digest !== member.sha256) throw new EquipoiseOwnData.Problem(`The model ${member.name} arrived damaged. Load this page again.`);
      }
      made.push(await runtime.InferenceSession.create(new Uint8Array(content), { executionProviders: ["wasm"] }));
    }
    sessions = made;
    return made;
  }

  function tensor(spec, sizes, values, first, count) {
    const each = sizes.reduce((all, size) => all * size, 1), part = values.slice(first * each, (first + count) * each);
    const shape = [count, ...sizes];
    if (spec.dtype === "int64") return new runtime.Tensor("int64", BigInt64Array.from(part, (value) => BigInt(value)), shape);
    if (spec.dtype === "bool") return new runtime.Tensor("bool", Uint8Array.from(part), shape);
    return spec.dtype === "float64" ? new runtime.Tensor("float64", Float64Array.from(part), shape) : new runtime.Tensor("float32", Float32Array.from(part), shape);
  }

  async function score(session, data) {
    const losses = [], errors = [], specs = [...signature.inputs, ...signature.targets];
    for (let first = 0; first < data.count; first += ROWS) {
      const count = Math.min(ROWS, data.count - first);
      const feeds = Object.fromEntries(specs.map((spec) => [spec.name, tensor(spec, data.shapes?.[spec.name] ?? spec.shape, spec.name === signature.targets[0].name ? data.y : data.inputs[spec.name], first, count)]));
      const found = await session.run(feeds);
      losses.push(...found.loss.data);
      errors.push(...found.error.data);
    }
    return { losses: losses.map(Number), errors: errors.map(Number) };
  }

  const span = (low, high, percent) => Number.isFinite(low) ? `${write(low, percent)} to ${write(high, percent)}` : "unknown: one example";

  function show(verdict) {
    const { rows, best, open, count } = verdict, named = (m) => `${family.knob} ${members[m].value}`;
    const examples = count === 1 ? "one example" : `${count} examples`;
    let words = `On your ${examples}, ${named(best)} serves you best.`;
    if (open.length) {
      words = `On your ${examples}, ${named(best)} has the lowest loss, but they do not tell it from ${open.map((m) => members[m].value).join(", ")}.`
        + (count < 30 ? " With more examples they may." : " For you these models are about as good.");
    }
    find("choose-verdict").textContent = words;
    find("choose-rows").replaceChildren(...rows.map((row) => {
      const line = document.createElement("tr"), head = document.createElement("th"), member = members[row.place];
      head.scope = "row";
      head.textContent = member.value;
      line.append(head);
      const behind = row.behind === null ? "the lowest" : `${span(row.behind.low, row.behind.high)}${row.worse ? "" : " (open)"}`;
      const wrong = row.wrong === null ? "–" : `${row.wrong} of ${count} (${span(row.share.low, row.share.high, true)})`;
      const mean = document.createElement("td");
      mean.textContent = write(row.mean);
      mean.dataset.loss = row.mean;
      if (row.place === best) mean.className = "best";
      line.append(mean);
      for (const text of [span(row.low, row.high), behind, wrong]) {
        const cell = document.createElement("td");
        cell.textContent = text;
        line.append(cell);
      }
      const cell = document.createElement("td"), link = document.createElement("a");
      link.href = member.model;
      link.textContent = "ONNX";
      link.setAttribute("aria-label", `Download the model at ${named(row.place)}`);
      cell.append(link);
      line.append(cell);
      return line;
    }));
    find("choose-note").textContent = "Intervals are at 95 %, by Student's t; those beside the best hold together for all models. "
      + (count < 10 ? "Fewer than ten examples are a hint, not more." : "");
    find("choose-answer").hidden = false;
    const data = JSON.parse(document.getElementById("knob-data").textContent);
    const place = data.members.findIndex((member) => member.value === members[best].value);
    document.dispatchEvent(new CustomEvent("equipoise-turn", { detail: place }));
  }

  find("choose-live").hidden = false;
  find("choose-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const file = find("choose-file").files[0];
    find("choose-problem").textContent = "";
    find("choose-answer").hidden = true;
    if (!file) return;
    try {
      say("Reading your file …");
      const data = await EquipoiseOwnData.read(file, family), running = await start();
      const losses = [], errors = [];
      for (const [m, session] of running.entries()) {
        say(`Trying ${members[m].name} …`);
        const found = await score(session, data);
        losses.push(found.losses);
        errors.push(found.errors);
      }
      if (losses.flat().some((value) => !Number.isFinite(value))) throw new EquipoiseOwnData.Problem("A loss on these examples is not finite: is a value outside of what training knew?");
      show(EquipoiseOwnData.judge(losses, errors));
      say("");
    } catch (failure) {
      say("");
      find("choose-problem").textContent = failure instanceof EquipoiseOwnData.Problem ? failure.message : `That did not work: ${failure.message}`;
    }
  });
  document.documentElement.dataset.choose = "ready";
})();
