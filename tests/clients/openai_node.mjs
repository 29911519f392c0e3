// openai for Node against a scripted server: argument 1 is the base URL, argument 2 the tool as JSON.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, tool, question, answer] = process.argv.slice(2);
const api = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const model = "tiny-glm";
const tools = [JSON.parse(tool)];
const degrees = { Oslo: 4, Rome: 21 };

function runTool(call) {
  assert.equal(call.function.name, "get_weather");
  const { city, days } = JSON.parse(call.function.arguments);
  assert.equal(days, { Oslo: 1, Rome: 2 }[city]);
  return { role: "tool", tool_call_id: call.id, content: JSON.stringify({ degrees: degrees[city] }) };
}

async function complete(messages, turn, stream) {
  const headers = { "x-request-id": `turn-${turn}` };
  const body = { model, messages, tools };
  if (!stream) return (await api.chat.completions.create(body, { headers })).choices[0];
  return (await api.chat.completions.stream(body, { headers }).finalChatCompletion()).choices[0];
}

for (const stream of [false, true]) {
  const messages = [{ role: "user", content: question }];
  const first = await complete(messages, 1, stream);
  assert.equal(first.finish_reason, "tool_calls");
  assert.equal(first.message.content, "Let me look.");
  assert.equal(first.message.tool_calls.length, 2);
  messages.push(first.message, ...first.message.tool_calls.map(runTool));
  const second = await complete(messages, 2, stream);
  assert.equal(second.message.content, answer);
  assert.equal(second.finish_reason, "stop");
}

const chunks = [];
const stream = await api.chat.completions.create(
  { model, messages: [{ role: "user", content: question }], stream: true, stream_options: { include_usage: true } },
  { headers: { "x-request-id": "turn-2" } },
);
for await (const chunk of stream) chunks.push(chunk);
assert.equal(chunks.map((c) => c.choices[0]?.delta.content ?? "").join(""), answer);
assert.equal(chunks.map((c) => c.choices[0]?.delta.reasoning_content ?? "").join(""), "Compare.");
assert.ok(chunks.at(-1).usage.completion_tokens > 0);

await assert.rejects(
  api.chat.completions.create({ model, messages: [{ role: "user", content: "x" }], temperature: -1 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
);
const left = await api.chat.completions.create(
  { model, messages: [{ role: "user", content: "x" }], stream: true, max_tokens: 4000 },
  { headers: { "x-request-id": "endless" } },
);
for await (const chunk of left) if (chunk.choices[0].delta.reasoning_content) break; // leaves the stream
console.log("ok");
