// The customer's whole loop through a Node SDK, every call as its pages show it. `main.mjs` of each
// version calls it with its package and a client; test_node.py starts that with the running
// product's URL, a key, a training file, one whose training is slow, and the metrics' URL. A step
// that goes wrong throws; the last line of the output names the versions and the steps that passed.
import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import fs from "node:fs";
import { setTimeout as pause } from "node:timers/promises";

const BASE = "smollm2-135m-instruct";
const QUESTIONS = 6;
const SECONDS_MAX = 120;
const [trainingFile, slowTrainingFile, metricsUrl] = process.argv.slice(2);

async function until(look, isIt) {
  const deadline = performance.now() + SECONDS_MAX * 1000;
  for (;;) {
    const seen = await look();
    if (isIt(seen)) return seen;
    assert.ok(performance.now() < deadline, JSON.stringify(seen));
    await pause(200);
  }
}

async function all(pages) {
  const items = [];
  for await (const item of pages) items.push(item);
  return items;
}

function nanoUsd(text) {
  const [whole, part = ""] = text.split(".");
  return BigInt(whole) * 10n ** 9n + BigInt(part.padEnd(9, "0"));
}

function requestLines(models, { delayMs = 0, questions = QUESTIONS } = {}) {
  const mark = delayMs ? ` echo-delay-ms=${delayMs}` : "";
  const lines = Array.from({ length: questions }, (_, number) => ({
    custom_id: `q${number}`,
    method: "POST",
    url: "/v1/chat/completions",
    body: {
      model: models[number % models.length],
      messages: [{ role: "user", content: `Ticket ${Math.floor(number / models.length)} é${mark}` }],
      max_completion_tokens: 16,
      temperature: 0,
    },
  }));
  return Buffer.from(lines.map((line) => JSON.stringify(line) + "\n").join(""));
}

// How often a route was asked so far, by status, as the server counts it.
async function requestsOf(method, route) {
  const text = await (await fetch(metricsUrl)).text();
  const start = `gridline_http_requests_total{method="${method}",route="${method} /openai/v1${route}",`;
  const counted = text.split("\n").filter((line) => line.startsWith(start));
  return new Map(counted.map((line) => [line.match(/status="(\d+)"/)[1], Number(line.split(" ").at(-1))]));
}

class Loop {
  constructor(sdk, client) {
    this.sdk = sdk;
    this.client = client;
  }

  async createBatch(lines) {
    const requests = await this.client.files.create({
      file: await this.sdk.toFile(lines, "requests.jsonl"),
      purpose: "batch",
    });
    return this.client.batches.create({
      input_file_id: requests.id,
      endpoint: "/v1/chat/completions",
      completion_window: "24h",
      metadata: { from: "node" },
    });
  }

  batchIn(id, status) {
    return until(() => this.client.batches.retrieve(id), (batch) => batch.status === status);
  }

  jobIn(id, status) {
    return until(() => this.client.fineTuning.jobs.retrieve(id), (job) => job.status === status);
  }

  upload(path) {
    return this.client.files.create({ file: fs.createReadStream(path), purpose: "fine-tune" });
  }

  async refusedWith(kind, call, expected) {
    let refused;
    try {
      await call();
    } catch (error) {
      refused = error;
    }
    assert.ok(refused instanceof kind, `${kind.name} was expected: ${refused}`);
    const seen = Object.fromEntries(Object.keys(expected).map((name) => [name, refused[name]]));
    assert.deepEqual(seen, expected);
    assert.ok(refused.requestID);
  }

  // The same, and the SDK asked so many times.
  async refusedAfter(tries, kind, method, route, call, expected) {
    const before = await requestsOf(method, route);
    await this.refusedWith(kind, call, expected);
    const after = await requestsOf(method, route);
    const asked = [...after].map(([status, count]) => [status, count - (before.get(status) ?? 0)]);
    assert.deepEqual(asked.filter(([, count]) => count), [[String(expected.status), tries]]);
  }

  async files() {
    const { client } = this;
    const bytes = fs.readFileSync(trainingFile);
    const first = await this.upload(trainingFile);
    assert.equal(first.filename, trainingFile.split("/").at(-1));
    assert.equal(first.bytes, bytes.length);
    assert.equal((await client.files.waitForProcessing(first.id)).status, "processed");
    assert.deepEqual(await client.files.retrieve(first.id), first);
    const content = await client.files.content(first.id);
    assert.ok(Buffer.from(await content.arrayBuffer()).equals(bytes));
    const others = [];
    for (let number = 0; number < 4; number++) {
      others.push(
        await client.files.create({
          file: await this.sdk.toFile(bytes, `${number}.jsonl`),
          purpose: "fine-tune",
          expires_after: { anchor: "created_at", seconds: 86_400 },
        }),
      );
    }
    assert.equal(others[0].expires_at, others[0].created_at + 86_400);
    const ids = [first, ...others].map((file) => file.id);
    const newestFirst = await all(client.files.list({ limit: 2 }));
    assert.deepEqual(newestFirst.map((file) => file.id), ids.toReversed());
    const oldestFirst = await all(client.files.list({ limit: 2, order: "asc" }));
    assert.deepEqual(oldestFirst.map((file) => file.id), ids);
    assert.deepEqual(await all(client.files.list({ purpose: "batch" })), []);
    assert.deepEqual(await client.files.delete(first.id), {
      id: first.id, object: "file", deleted: true,
    });
    await this.refusedWith(this.sdk.NotFoundError, () => client.files.content(first.id), {
      status: 404, code: "not_found", param: "id",
    });
  }

  async training() {
    const { client } = this;
    const training = await this.upload(trainingFile);
    this.job = await client.fineTuning.jobs.create({
      model: BASE,
      training_file: training.id,
      seed: 7,
      metadata: { team: "support" },
      method: {
        type: "supervised",
        supervised: { hyperparameters: { n_epochs: 2, batch_size: 4, lora_rank: 8 } },
      },
    });
    assert.equal(this.job.hyperparameters.n_epochs, 2);
    assert.ok(this.job._request_id);
    const done = await this.jobIn(this.job.id, "succeeded");
    assert.equal(done.error, null);
    assert.deepEqual(done.metadata, { team: "support" });
    this.model = done.fine_tuned_model;
    assert.ok(this.model.startsWith(`ft:${BASE}:${done.organization_id}:`));
    const events = await all(client.fineTuning.jobs.listEvents(this.job.id, { limit: 2 }));
    assert.ok(events.length > 3 && new Set(events.map((event) => event.id)).size === events.length);
    const [checkpoint] = await all(client.fineTuning.jobs.checkpoints.list(this.job.id));
    assert.equal(checkpoint.fine_tuned_model_checkpoint, this.model);
    const jobs = await all(client.fineTuning.jobs.list({ limit: 1 }));
    assert.deepEqual(jobs.map((job) => job.id), [this.job.id]);
    const receipt = await client.get(`/gridline/receipts/${this.job.id}`);
    assert.equal(receipt.charge_usd, done.gridline.charged_usd);
    assert.ok(Number(receipt.charge_usd) <= this.job.gridline.quote.per_token.max_charge_usd);
  }

  async models() {
    const ids = (await all(this.client.models.list())).map((model) => model.id);
    assert.ok(ids.includes(BASE) && ids.includes(this.model));
    assert.equal((await this.client.models.retrieve(this.model)).id, this.model);
  }

  async batch() {
    const { client } = this;
    const created = await this.createBatch(requestLines([BASE, this.model]));
    const batch = await this.batchIn(created.id, "completed");
    assert.deepEqual(batch.request_counts, { total: QUESTIONS, completed: QUESTIONS, failed: 0 });
    assert.deepEqual(batch.metadata, { from: "node" });
    assert.equal(batch.error_file_id, null);
    const text = await (await client.files.content(batch.output_file_id)).text();
    const lines = text.trimEnd().split("\n").map((line) => JSON.parse(line));
    const answers = new Map(lines.map((line) => [line.custom_id, line.response.body]));
    assert.equal(answers.size, lines.length);
    for (let number = 0; number < QUESTIONS; number++) {
      assert.equal(answers.get(`q${number}`).model, number % 2 ? this.model : BASE);
    }
    const tokens = lines.map((line) => line.response.body.usage.total_tokens);
    assert.equal(batch.usage.total_tokens, tokens.reduce((sum, each) => sum + each, 0));
    const batches = await all(client.batches.list({ limit: 1 }));
    assert.deepEqual(batches.map((each) => each.id), [batch.id]);
  }

  async adapter() {
    for (const file of ["adapter_config.json", "adapter_model.safetensors"]) {
      const path = `/gridline/adapters/${this.model}/files/${file}`;
      const answer = await this.client.get(path).asResponse();
      const bytes = Buffer.from(await answer.arrayBuffer());
      const sha256 = createHash("sha256").update(bytes).digest("hex");
      assert.equal(answer.headers.get("x-gridline-sha256"), sha256);
    }
  }

  async cancel() {
    const { client, sdk } = this;
    const training = await this.upload(slowTrainingFile);
    const job = await client.fineTuning.jobs.create({
      model: BASE, training_file: training.id, hyperparameters: { n_epochs: 9 },
    });
    const slow = requestLines([BASE], { delayMs: 300, questions: 60 });
    const batch = await this.createBatch(slow);
    await this.refusedAfter(
      3, sdk.RateLimitError, "POST", "/batches",
      () => this.createBatch(requestLines([BASE])), { status: 429, code: "limit_exceeded" },
    );
    await this.batchIn(batch.id, "in_progress");
    await this.jobIn(job.id, "running");
    assert.equal((await client.fineTuning.jobs.cancel(job.id)).status, "cancelled");
    await client.batches.cancel(batch.id);
    const { request_counts: counts } = await this.batchIn(batch.id, "cancelled");
    assert.equal(counts.completed + counts.failed, 60);
    const conflict = { status: 409, code: "invalid_state" };
    await this.refusedAfter(
      1, sdk.ConflictError, "POST", "/fine_tuning/jobs/{job_id}/cancel",
      () => client.fineTuning.jobs.cancel(job.id), conflict,
    );
    await this.refusedAfter(
      1, sdk.ConflictError, "POST", "/batches/{batch_id}/cancel",
      () => client.batches.cancel(batch.id), conflict,
    );
  }

  async errors() {
    const { client, sdk } = this;
    const stranger = client.withOptions({ apiKey: "gl_wrong" });
    await this.refusedWith(sdk.AuthenticationError, () => stranger.models.list(), {
      status: 401, code: "invalid_api_key", type: "invalid_request_error",
    });
    const bad = await sdk.toFile(Buffer.from('{"messages": []}\n'), "t.jsonl");
    await this.refusedWith(
      sdk.BadRequestError, () => client.files.create({ file: bad, purpose: "fine-tune" }),
      { status: 400, code: "invalid_messages" },
    );
    await this.refusedWith(
      sdk.BadRequestError,
      () => client.fineTuning.jobs.create({ model: BASE, training_file: "file-x", turbo: true }),
      { status: 400, code: "invalid_request", param: "turbo" },
    );
    await this.refusedWith(sdk.NotFoundError, () => client.fineTuning.jobs.retrieve("ftjob-none"), {
      status: 404, code: "not_found", param: "fine_tuning_job_id",
    });
    const messages = [{ role: "user", content: "Hi" }];
    await this.refusedWith(
      sdk.NotFoundError, () => client.chat.completions.create({ model: BASE, messages }),
      { status: 404, code: "not_offered" },
    );
    const created = await this.createBatch(Buffer.from('{"custom_id": "a"}\n'));
    const failed = await this.batchIn(created.id, "failed");
    assert.equal(failed.errors.data[0].line, 1);
  }

  async statement() {
    const credit = await this.client.get("/gridline/credits");
    const charged = nanoUsd(credit.charged_usd);
    assert.equal(nanoUsd(credit.available_usd), nanoUsd(credit.granted_usd) - charged);
    assert.deepEqual(credit.holds, []);
    const statement = await until(
      () => this.client.get("/gridline/statement"), (each) => each.is_current,
    );
    const lines = statement.data.map((line) => nanoUsd(line.charged_usd));
    assert.equal(lines.reduce((sum, each) => sum + each, 0n), charged);
    assert.equal(statement.closing.available_usd, credit.available_usd);
  }

  async deletion() {
    assert.equal((await this.client.models.delete(this.model)).deleted, true);
    await this.refusedWith(
      this.sdk.NotFoundError, () => this.client.models.retrieve(this.model), { status: 404 },
    );
  }
}

const STEPS = [
  "files", "training", "models", "batch", "adapter", "cancel", "errors", "statement", "deletion",
];

export async function loop(sdk, version, client) {
  const customer = new Loop(sdk, client);
  for (const step of STEPS) {
    console.error(`step: ${step}`);
    await customer[step]();
  }
  console.log(JSON.stringify({ node: process.version, openai: version, passed: STEPS }));
}
