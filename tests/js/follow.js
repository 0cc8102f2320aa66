// What the tests ask of the official client, in Node and in a browser alike: call Generate, take some messages, and say
// how it ended.  Nothing here is of Midstream but the definition of its service.

import { fileDesc, serviceDesc } from "@bufbuild/protobuf/codegenv2";
import { Code, ConnectError, createClient } from "@connectrpc/connect";

/** The client of the service whose definition this is, as a FileDescriptorProto in base64. */
export function clientOf(definition, transport) {
  return createClient(serviceDesc(fileDesc(definition), 0), transport);
}

/**
 * Follow one call.  `take`: leave after so many messages, as a page does that is closed; `into`: where messages go.
 * Gives {messages: [[token, index, final]], streamId, code, message, details: [[type, base64]]}; code is "" at a good end.
 */
export async function follow(client, request, { headers = {}, take = Infinity, timeoutMs, into = [] } = {}) {
  const told = { messages: into, streamId: null, code: "", message: "", details: [] };
  const leaving = new AbortController();
  const options = {
    headers,
    timeoutMs,
    signal: leaving.signal,
    onHeader: (header) => (told.streamId = header.get("midstream-stream-id")),
  };
  try {
    if (take === 0) leaving.abort();
    for await (const { token, tokenIndex, isFinal } of client.generate(request, options)) {
      told.messages.push([token, tokenIndex, isFinal]);
      if (told.messages.length >= take) break;
    }
  } catch (caught) {
    const error = ConnectError.from(caught);
    told.code = Code[error.code];
    told.message = error.rawMessage;
    told.details = error.details.map(({ type, value }) => [type, base64(value)]);
  }
  return told;
}

/** Call Ack or Cancel: their answer, or {code, message, details}. */
export async function once(client, method, request, { headers = {} } = {}) {
  try {
    const { $typeName, ...answer } = await client[method](request, { headers });
    return answer;
  } catch (caught) {
    const error = ConnectError.from(caught);
    const details = error.details.map(({ type, value }) => [type, base64(value)]);
    return { code: Code[error.code], message: error.rawMessage, details };
  }
}

function base64(bytes) {
  return btoa(String.fromCharCode(...bytes));
}
