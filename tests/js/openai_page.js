// A page that asks through OpenAI's official client, imported as it ships.

import OpenAI from "/modules/openai/index.mjs";

/** What has been heard of the answer under way; `end` is null once it is complete, or what was thrown. */
export let heard;

/** Streams one answer: `how` is `create` or `stream` (Chat Completions), or `responses`, cut off after `cut` deltas and resumed. */
export async function ask({ how, base, key, cut }) {
  heard = { text: "", cuts: 0, end: undefined };
  const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: key, dangerouslyAllowBrowser: true, maxRetries: 0 });
  try {
    await { create, stream, responses }[how](client, cut);
    heard.end = null;
  } catch (error) {
    heard.end = `${error.constructor.name}: ${error.message}`;
  }
}

const chat = { model: "puppet", messages: [{ role: "user", content: "Hello" }] };

async function create(client) {
  for await (const chunk of await client.chat.completions.create({ ...chat, stream: true })) {
    heard.text += chunk.choices[0]?.delta?.content ?? "";
  }
}

async function stream(client) {
  for await (const chunk of client.chat.completions.stream(chat)) heard.text += chunk.choices[0]?.delta?.content ?? "";
}

async function responses(client, cut) {
  let id, seen;
  const take = (event) => {
    seen = event.sequence_number;
    if (event.type === "response.created") id = event.response.id;
    if (event.type === "response.output_text.delta") heard.text += event.delta;
    return heard.text.length < cut;
  };
  for await (const event of await client.responses.create({ model: "puppet", input: "Hello", stream: true })) {
    if (!take(event)) break;
  }
  heard.cuts += 1;
  for await (const event of await client.responses.retrieve(id, { stream: true, starting_after: seen })) take(event);
}
