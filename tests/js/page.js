// A page that reads an answer to its end, across cuts, with the official client for browsers.

import { createConnectTransport, createGrpcWebTransport } from "@connectrpc/connect-web";
import { clientOf, follow } from "./follow.js";

const transports = { connect: createConnectTransport, "grpc-web": createGrpcWebTransport };

/** What has been heard so far; `breaks` are the codes with which calls ended before the answer did. */
export const heard = { messages: [], breaks: [], streamId: null, done: false };

export async function read({ protocol, base, definition, prompt, session, key }) {
  const client = clientOf(definition, transports[protocol]({ baseUrl: base }));
  while (!heard.done) {
    const headers = { Authorization: `Bearer ${key}` };
    if (heard.streamId !== null) headers["Midstream-Stream-Id"] = heard.streamId;
    const request = { prompt, sessionId: session, resumeFromToken: heard.messages.length };
    const told = await follow(client, request, { headers, into: heard.messages });
    heard.streamId = told.streamId ?? heard.streamId;
    heard.done = told.code === "";
    if (!heard.done) heard.breaks.push(told.code);
    if (!["", "Unknown", "Unavailable"].includes(told.code)) throw new Error(`${told.code}: ${told.message}`);
  }
}
