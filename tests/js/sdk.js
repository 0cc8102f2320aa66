// One answer through an official JavaScript SDK, told to the test as lines of JSON: {"text": …} for each piece, then
// {"end": null} or {"end": "what was thrown"}.

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { streamText } from "ai";
import OpenAI from "openai";

const { sdk, base, model, cut } = JSON.parse(process.argv[2]);
const tell = (line) => process.stdout.write(JSON.stringify(line) + "\n");
const messages = [{ role: "user", content: "Hello" }];

async function chat() {
  const client = new OpenAI({ baseURL: base, apiKey: "none", maxRetries: 0 });
  const stream = await client.chat.completions.create({ model, messages, stream: true });
  for await (const chunk of stream) {
    const text = chunk.choices[0]?.delta?.content;
    if (text) tell({ text });
  }
}

async function responses() {
  const client = new OpenAI({ baseURL: base, apiKey: "none", maxRetries: 0 });
  let stream = await client.responses.create({ model, input: "Hello", stream: true });
  let id, seen;
  let pieces = 0;
  for await (const event of stream) {
    seen = event.sequence_number;
    if (event.type === "response.created") id = event.response.id;
    if (event.type === "response.failed") throw new Error(event.response.error.message);
    if (event.type === "response.output_text.delta") {
      tell({ text: event.delta });
      if (++pieces === cut) break;
    }
  }
  if (cut === undefined) return;
  stream = await client.responses.retrieve(id, { stream: true, starting_after: seen });
  for await (const event of stream) {
    if (event.type === "response.output_text.delta") tell({ text: event.delta });
  }
}

// The names of the headers it sends, which a browser asks for in a preflight.
async function headers() {
  const fetch = async (_, { headers }) => {
    tell({ text: [...new Headers(headers).keys()].join(" ") });
    return new Response("{}", { headers: { "content-type": "application/json" } });
  };
  const client = new OpenAI({ baseURL: base, apiKey: "none", organization: "o", project: "p", fetch });
  await client.chat.completions.create({ model, messages });
}

async function vercel() {
  const provider = createOpenAICompatible({ name: "midstream", baseURL: base });
  const { fullStream } = streamText({
    model: provider(model),
    messages,
    maxRetries: 0,
    onError: () => {},
  });
  for await (const part of fullStream) {
    if (part.type === "text-delta") tell({ text: part.text });
    if (part.type === "error") throw part.error;
  }
}

try {
  await { chat, headers, responses, vercel }[sdk]();
  tell({ end: null });
} catch (error) {
  tell({ end: String(error?.message ?? error?.error?.message ?? JSON.stringify(error)) });
}
