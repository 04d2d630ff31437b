// node llama.mjs JOBS.json, in a folder with node-llama-cpp: what llama.cpp makes of GGUF files.
//
// Each job has `gguf`, `texts`, `ids`, `vocabulary`, `out` and perhaps `lora`, the file of an adapter. Writes to OUT the tokens of the texts and the tokens that end
// generation, and to OUT.f32 the log probabilities of all tokens at each position of `ids`, in float32.
import fs from "node:fs";
import {createRequire} from "node:module";

const {getLlama} = await import(createRequire(`${process.cwd()}/x.js`).resolve("node-llama-cpp"));
const llama = await getLlama({gpu: false, build: "never", skipDownload: true, logLevel: "error", maxThreads: 2});
// The whole distribution, without sampling, and a cache in F32: in F16, the default, it alone differs by 5e-3.
const want = {generateNext: {probabilities: true, options: {temperature: 1, topK: 0, topP: 1, minP: 0}}};
const options = {contextSize: 512, batchSize: 512, flashAttention: false, experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32"};

async function run(job) {
  const model = await llama.loadModel({modelPath: job.gguf});
  const ends = Array.from({length: job.vocabulary}, (_, i) => i).filter(i => model.isEogToken(i));
  const tokens = job.texts.map(text => Array.from(model.tokenize(text, true)));
  if (job.ids.length > 0) {
    const context = await model.createContext(job.lora ? {...options, lora: job.lora} : options);
    const rows = await context.getSequence().controlledEvaluate(job.ids.map(id => [id, want]));
    const logs = new Float32Array(job.ids.length * job.vocabulary).fill(-103);
    rows.forEach((row, i) => row.next.probabilities.forEach((p, id) => { logs[i * job.vocabulary + id] = Math.log(Math.max(p, 1e-44)); }));
    fs.writeFileSync(`${job.out}.f32`, Buffer.from(logs.buffer));
    await context.dispose();
  }
  const found = {tokens, ends, bos: model.tokens.bos, adds_bos: model.tokens.shouldPrependBosToken};
  await model.dispose();
  return found;
}

for (const job of JSON.parse(fs.readFileSync(process.argv[2], "utf8"))) {
  let result;
  try { result = await run(job); } catch (error) { result = {error: String(error)}; }
  fs.writeFileSync(job.out, JSON.stringify(result));
}
console.log(llama.llamaCppRelease.release);
process.exit(0);
