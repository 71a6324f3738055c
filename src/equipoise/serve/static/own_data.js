// Reads a client's own CSV or npz file into the inputs and targets of a model, and judges losses. Nothing here asks the network.
"use strict";
const EquipoiseOwnData = (() => {
  const MISSING = new Set(["", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "#N/A", "n/a", "-nan", "-NaN", "<NA>"]);
  const TARGETS = ["y", "target", "label"];
  const LARGEST = 64 * 2 ** 20, MOST_ROWS = 200000;
  class Problem extends Error {}

  // ------------------------------------------------------------------------------------------------------------------- CSV
  function parseCsv(text) {
    const rows = [];
    let row = [], field = "", quoted = false, was = false;
    const source = text.replace(/^\ufeff/, "");
    for (let k = 0; k < source.length; k += 1) {
      const letter = source[k];
      if (quoted) {
        if (letter === '"' && source[k + 1] === '"') { field += '"'; k += 1; }
        else if (letter === '"') quoted = false;
        else field += letter;
      } else if (letter === '"' && field === "") { quoted = true; was = true; }
      else if (letter === ",") { row.push(field); field = ""; was = false; }
      else if (letter === "\n" || letter === "\r") {
        if (letter === "\r" && source[k + 1] === "\n") k += 1;
        if (field !== "" || row.length || was) rows.push([...row, field]);
        row = []; field = ""; was = false;
        if (rows.length > MOST_ROWS) throw new Problem(`The file has more than ${MOST_ROWS} rows. Give a part of them.`);
      } else field += letter;
    }
    if (quoted) throw new Problem("The file is no CSV: a quote is opened and never closed.");
    if (field !== "" || row.length) rows.push([...row, field]);
    if (rows.length < 2) throw new Problem("The file holds no examples: it needs a row of names and then a row for each example.");
    const width = rows[0].length;
    const odd = rows.findIndex((each) => each.length !== width);
    if (odd >= 0) throw new Problem(`Row ${odd} has ${rows[odd].length} columns, but the first has ${width}.`);
    return rows;
  }

  const isNumber = (text) => /^\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*$/.test(text);

  function columnsOf(rows) {
    const bare = rows[0].every((text) => isNumber(text));
    const names = bare ? rows[0].map((text, k) => `column ${k}`) : rows[0].map((text) => text.trim());
    if (new Set(names).size < names.length) throw new Problem("Two columns have the same name.");
    const body = bare ? rows : rows.slice(1);
    return { names, columns: Object.fromEntries(names.map((name, k) => [name, body.map((row) => row[k].trim())])), count: body.length };
  }

  function numberOf(text, name, row) {
    if (!isNumber(text)) throw new Problem(`Column ${name}, row ${row} holds ${JSON.stringify(text.slice(0, 40))}, which is no number.`);
    return Number(text);
  }

  // ---------------------------------------------------------------------------------------------------------------- tables
  function days(text, name, row) {
    const parts = /^(\d{4})-(\d{2})-(\d{2})(?:[T ](\d{2}):(\d{2})(?::(\d{2})(?:\.(\d{1,6}))?)?)?(Z|[-+]\d{2}:\d{2})?$/.exec(text);
    if (!parts) throw new Problem(`Column ${name}, row ${row} holds ${JSON.stringify(text.slice(0, 40))}, which is no date (write it as 2026-11-16).`);
    const [, year, month, day, hour = 0, minute = 0, second = 0, rest = "0", zone] = parts;
    let at = Date.UTC(+year, month - 1, +day, +hour, +minute, +second) / 86400000 + Number(`0.${rest}`) / 86400;
    if (zone && zone !== "Z") at -= (zone[0] === "-" ? -1 : 1) * (Number(zone.slice(1, 3)) * 60 + Number(zone.slice(4))) / 1440;
    return at;
  }

  const nameOf = (text) => isNumber(text) && Number.isInteger(Number(text)) ? String(Number(text)) : text;

  function bySchema(schema, table) {
    const { columns, count } = table, features = [], codes = [];
    const read = (name) => {
      if (!(name in columns)) throw new Problem(`The column ${name} is missing. The file has ${table.names.slice(0, 12).join(", ")}.`);
      return columns[name];
    };
    for (const rule of schema.columns) {
      if (rule.becomes === "left out") continue;
      const texts = read(rule.name), gaps = texts.map((text) => MISSING.has(text));
      if (rule.becomes === "scaled") {
        const values = texts.map((text, row) => {
          if (gaps[row]) return rule.median;
          if (rule.kind === "date") return days(text, rule.name, row);
          if (rule.kind !== "boolean") return numberOf(text, rule.name, row);
          const known = { true: 1, false: 0, 1: 1, 0: 0, "1.0": 1, "0.0": 0 }[text.toLowerCase()];
          if (known === undefined) throw new Problem(`Column ${rule.name}, row ${row} holds ${JSON.stringify(text.slice(0, 40))}, but must be true or false.`);
          return known;
        });
        features.push(values.map((value) => rule.deviation ? (value - rule.mean) / rule.deviation : value * 0));
        if (rule.indicator) features.push(gaps.map(Number));
        continue;
      }
      const place = new Map(rule.categories.map((name, k) => [name, k + 2]));
      const own = texts.map((text, row) => gaps[row] ? 1 : place.get(nameOf(text)) ?? place.get(text) ?? 0);
      if (rule.becomes === "codes") codes.push(own);
      else {
        rule.categories.forEach((name, k) => features.push(own.map((code) => Number(code === k + 2))));
        if (rule.indicator) features.push(own.map((code) => Number(code === 1)));
      }
    }
    const target = read(schema.target.name);
    const y = target.map((text, row) => {
      if (MISSING.has(text)) throw new Problem(`The target ${schema.target.name} is missing in row ${row}. Drop this row.`);
      if (schema.target.kind === "number") return numberOf(text, schema.target.name, row);
      const found = schema.target.classes.findIndex((name) => name === text || name === nameOf(text));
      if (found < 0) throw new Problem(`Row ${row} holds the class ${JSON.stringify(text.slice(0, 40))}; training knew ${schema.target.classes.slice(0, 12).join(", ")}.`);
      return found;
    });
    const rows = (parts) => Array.from({ length: count }, (none, row) => parts.map((part) => part[row])).flat();
    return { count, y, inputs: { x: rows(features), numbers: rows(features), codes: rows(codes) } };
  }

  function byPosition(signature, classes, table) {
    const { names, columns, count } = table, wanted = signature.inputs[0].shape.reduce((all, size) => all * size, 1);
    const lower = names.map((name) => name.toLowerCase());
    const found = TARGETS.map((name) => lower.indexOf(name)).find((place) => place >= 0);
    const target = names[found === undefined ? names.length - 1 : found];
    const inputs = names.filter((name) => name !== target && name.toLowerCase() !== "client");
    if (inputs.length !== wanted) throw new Problem(`The file has ${inputs.length} columns beside the target ${target}, but the models take ${wanted}.`);
    const x = [];
    for (let row = 0; row < count; row += 1) for (const name of inputs) x.push(numberOf(columns[name][row], name, row));
    const y = columns[target].map((text, row) => {
      const named = classes.indexOf(text);
      return named >= 0 ? named : numberOf(text, target, row);
    });
    return { count, y, inputs: { [signature.inputs[0].name]: scaled(x, signature.inputs[0], x.every(Number.isInteger)) } };
  }

  const scaled = (values, spec, raw) => raw && spec.scale !== null ? values.map((value) => value * spec.scale + spec.shift) : values;

  // ------------------------------------------------------------------------------------------------------------------- npz
  async function inflate(bytes, most) {
    const reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw")).getReader();
    const parts = [];
    let total = 0;
    for (;;) {
      const { done, value } = await reader.read().catch(() => { throw new Problem("The npz file is damaged: an array cannot be unpacked."); });
      if (done) break;
      total += value.length;
      if (total > most) { reader.cancel(); throw new Problem("The npz file unpacks to more than it may hold."); }
      parts.push(value);
    }
    return new Uint8Array(await new Blob(parts).arrayBuffer());
  }

  async function parseNpz(buffer, wanted) {
    const view = new DataView(buffer), end = buffer.byteLength - 22;
    let at = end;
    while (at >= 0 && at > end - 65536 && view.getUint32(at, true) !== 0x06054b50) at -= 1;
    if (at < 0 || view.getUint32(at, true) !== 0x06054b50) throw new Problem("The file is no npz file.");
    const arrays = {};
    let entry = view.getUint32(at + 16, true);
    for (let k = view.getUint16(at + 10, true); k > 0; k -= 1) {
      if (entry + 46 > buffer.byteLength || view.getUint32(entry, true) !== 0x02014b50) throw new Problem("The npz file is damaged.");
      const method = view.getUint16(entry + 10, true), flags = view.getUint16(entry + 8, true);
      let packed = view.getUint32(entry + 20, true), size = view.getUint32(entry + 24, true);
      const nameLength = view.getUint16(entry + 28, true), extra = view.getUint16(entry + 30, true), note = view.getUint16(entry + 32, true);
      const local = view.getUint32(entry + 42, true);
      const name = new TextDecoder().decode(new Uint8Array(buffer, entry + 46, nameLength)).replace(/\.npy$/, "");
      entry += 46 + nameLength + extra + note;
      if (!wanted.includes(name)) continue;
      if (flags & 1 || size === 0xffffffff || packed === 0xffffffff) throw new Problem("The npz file is encrypted, or too large.");
      const start = local + 30 + view.getUint16(local + 26, true) + view.getUint16(local + 28, true);
      if (start + packed > buffer.byteLength || size > LARGEST * 4) throw new Problem("The npz file is damaged, or too large.");
      const content = new Uint8Array(buffer, start, packed);
      arrays[name] = parseNpy(method === 0 ? content : await inflate(content, size + 1), name);
    }
    for (const name of wanted) if (!arrays[name]) throw new Problem(`The npz file has no array ${name}. It must have ${wanted.join(", ")}.`);
    return arrays;
  }

  function parseNpy(bytes, name) {
    const magic = String.fromCharCode(...bytes.slice(0, 6)), view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    if (magic !== "\x93NUMPY") throw new Problem(`The array ${name} is damaged.`);
    const long = bytes[6] > 1, length = long ? view.getUint32(8, true) : view.getUint16(8, true), start = (long ? 12 : 10) + length;
    const header = new TextDecoder().decode(bytes.slice(long ? 12 : 10, start));
    const kind = /'descr':\s*'([<|=])([fiub])(\d)'/.exec(header), order = /'fortran_order':\s*(True|False)/.exec(header);
    const shape = /'shape':\s*\(([\d, ]*)\)/.exec(header);
    if (!kind || !order || !shape || order[1] === "True") throw new Problem(`The array ${name} must hold plain numbers, row by row.`);
    const types = { f4: Float32Array, f8: Float64Array, i1: Int8Array, i2: Int16Array, i4: Int32Array, u1: Uint8Array, u2: Uint16Array,
      u4: Uint32Array, b1: Uint8Array, i8: BigInt64Array, u8: BigUint64Array };
    const type = types[kind[2] + kind[3]], sizes = shape[1].split(",").map((text) => text.trim()).filter(Boolean).map(Number);
    const count = sizes.reduce((all, size) => all * size, 1);
    if (!type || bytes.length - start < count * type.BYTES_PER_ELEMENT) throw new Problem(`The array ${name} is damaged, or of a type that is not read here.`);
    const values = Array.from(new type(bytes.slice(start, start + count * type.BYTES_PER_ELEMENT).buffer), Number);
    return { values, shape: sizes, floating: kind[2] === "f" };
  }

  function fromArrays(signature, arrays) {
    const [target] = signature.targets, count = arrays[signature.inputs[0].name].shape[0], inputs = {}, shapes = {};
    for (const spec of [...signature.inputs, target]) {
      const { shape, values, floating } = arrays[spec.name];
      const fits = shape.length === 1 + spec.shape.length && shape.slice(1).every((size, k) => spec.shape[k] < 0 || size === spec.shape[k]);
      const wanted = ["examples", ...spec.shape.map((size) => size < 0 ? "any" : size)].join(", ");
      if (!fits) throw new Problem(`${spec.name} must be of shape (${wanted}), but is (${shape.join(", ")}).`);
      if (shape[0] !== count) throw new Problem(`${spec.name} must hold an entry for each of the ${count} examples, but has ${shape[0]}.`);
      shapes[spec.name] = shape.slice(1);
      if (spec !== target) inputs[spec.name] = scaled(values, spec, !floating);
    }
    return { count, y: arrays[target.name].values, inputs, shapes };
  }

  // Whether an example is one row of numbers with one target: what a CSV file can hold.
  const isPlain = ({ inputs, targets }) => inputs.length === 1 && targets.length === 1 && targets[0].shape.length === 0 && inputs[0].shape.every((size) => size > 0);

  // ---------------------------------------------------------------------------------------------------------------- the file
  async function read(file, { signature, classes, schema }) {
    if (file.size > LARGEST) throw new Problem(`The file is larger than ${LARGEST / 2 ** 20} MB. Give a part of the examples.`);
    let found;
    if (/\.npz$/i.test(file.name)) {
      if (schema) throw new Problem("These models take the columns of a table: give a CSV file.");
      found = fromArrays(signature, await parseNpz(await file.arrayBuffer(), [...signature.inputs, ...signature.targets].map((spec) => spec.name)));
    } else {
      if (!schema && !isPlain(signature)) throw new Problem("The inputs of these models are not rows of numbers: give an npz file.");
      const text = new TextDecoder("utf-8", { fatal: true });
      let content;
      try { content = text.decode(await file.arrayBuffer()); } catch (failure) { throw new Problem("The file is no CSV: it is not text in UTF-8."); }
      const table = columnsOf(parseCsv(content));
      found = schema ? bySchema(schema, table) : byPosition(signature, classes, table);
    }
    if (!found.count) throw new Problem("The file holds no examples.");
    const target = signature.targets[0];
    if (target.dtype === "int64") {
      const odd = found.y.findIndex((value) => !Number.isInteger(value) || (signature.classes && (value < 0 || value >= signature.classes)));
      if (odd >= 0) throw new Problem(`The target in row ${odd} is ${found.y[odd]}, but must be a class from 0 to ${signature.classes - 1}.`);
    }
    const bad = [...signature.inputs.map((spec) => found.inputs[spec.name]), found.y].find((values) => values.some((value) => !Number.isFinite(value)));
    if (bad) throw new Problem("The file holds NaN or infinity. Repair or drop that example.");
    const odd = signature.inputs.find((spec) => spec.dtype === "int64" && !found.inputs[spec.name].every(Number.isInteger));
    if (odd) throw new Problem(`${odd.name} must hold whole numbers.`);
    return found;
  }

  // ------------------------------------------------------------------------------------------------------------- the verdict
  function logGamma(x) {
    const parts = [76.18009172947146, -86.50532032941677, 24.01409824083091, -1.231739572450155, 0.1208650973866179e-2, -0.5395239384953e-5];
    let y = x, sum = 1.000000000190015;
    const at = x + 5.5 - (x + 0.5) * Math.log(x + 5.5);
    for (const part of parts) { y += 1; sum += part / y; }
    return -at + Math.log(2.5066282746310005 * sum / x);
  }

  function betaFraction(a, b, x) {
    let c = 1, d = 1 - (a + b) * x / (a + 1);
    d = 1 / (Math.abs(d) < 1e-300 ? 1e-300 : d);
    let h = d;
    for (let m = 1; m <= 500; m += 1) {
      for (const part of [m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)), -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))]) {
        d = 1 + part * d; c = 1 + part / c;
        if (Math.abs(d) < 1e-300) d = 1e-300;
        if (Math.abs(c) < 1e-300) c = 1e-300;
        d = 1 / d;
        h *= d * c;
      }
      if (Math.abs(d * c - 1) < 1e-14) break;
    }
    return h;
  }

  function beta(x, a, b) {
    if (x <= 0) return 0;
    if (x >= 1) return 1;
    const front = Math.exp(logGamma(a + b) - logGamma(a) - logGamma(b) + a * Math.log(x) + b * Math.log(1 - x));
    return x < (a + 1) / (a + b + 2) ? front * betaFraction(a, b, x) / a : 1 - front * betaFraction(b, a, 1 - x) / b;
  }

  function solve(wanted, low, high, rising) {
    for (let k = 0; k < 200; k += 1) {
      const middle = (low + high) / 2;
      if (rising(middle) < wanted) low = middle; else high = middle;
    }
    return (low + high) / 2;
  }

  const studentCdf = (t, freedom) => 1 - beta(freedom / (freedom + t * t), freedom / 2, 0.5) / 2;
  const studentQuantile = (p, freedom) => { let high = 2; while (studentCdf(high, freedom) < p && high < 1e9) high *= 2; return solve(p, 0, high, (t) => studentCdf(t, freedom)); };

  function meanInterval(values, confidence) {
    const count = values.length, mean = values.reduce((sum, each) => sum + each, 0) / count;
    if (count < 2) return { mean, low: -Infinity, high: Infinity };
    const spread = Math.sqrt(values.reduce((sum, each) => sum + (each - mean) ** 2, 0) / (count - 1) / count);
    const reach = spread * studentQuantile((1 + confidence) / 2, count - 1);
    return { mean, low: mean - reach, high: mean + reach };
  }

  function shareInterval(wrong, count, confidence) {
    const rest = (1 - confidence) / 2;
    return { low: wrong === 0 ? 0 : solve(rest, 0, 1, (p) => beta(p, wrong, count - wrong + 1)),
      high: wrong === count ? 1 : solve(1 - rest, 0, 1, (p) => beta(p, wrong + 1, count - wrong)) };
  }

  // losses[m] and errors[m] are those of member m, one number per example, in the same order of examples.
  function judge(losses, errors) {
    const rows = losses.map((each, m) => {
      const wrong = errors[m].every((error) => error === 0 || error === 1) ? errors[m].reduce((sum, error) => sum + error, 0) : null;
      return { place: m, ...meanInterval(each, 0.95), wrong, share: wrong === null ? null : shareInterval(wrong, each.length, 0.95) };
    });
    const best = rows.reduce((first, row) => row.mean < first.mean ? row : first, rows[0]).place;
    const confidence = 1 - 0.05 / Math.max(1, losses.length - 1);
    for (const row of rows) {
      row.behind = row.place === best ? null : meanInterval(losses[row.place].map((loss, k) => loss - losses[best][k]), confidence);
      row.worse = row.behind !== null && row.behind.low > 0;
    }
    return { best, rows, open: rows.filter((row) => row.place !== best && !row.worse).map((row) => row.place), count: losses[0].length };
  }

  return { read, judge, meanInterval, shareInterval, studentQuantile, Problem };
})();
