// node client.js '{"protocol", "base", "definition", "calls": [...]}': make the calls, one after the other, each as
// {"generate": request, "options"?} or {"ack" | "cancel": request, "options"?}, and print what came of each as JSON.

import { createConnectTransport, createGrpcTransport, createGrpcWebTransport } from "@connectrpc/connect-node";
import { clientOf, follow, once } from "./follow.js";

const transports = {
  connect: (baseUrl) => createConnectTransport({ baseUrl, httpVersion: "1.1", useBinaryFormat: false }),
  "connect-binary": (baseUrl) => createConnectTransport({ baseUrl, httpVersion: "1.1", useBinaryFormat: true }),
  "grpc-web": (baseUrl) => createGrpcWebTransport({ baseUrl, httpVersion: "1.1" }),
  grpc: (baseUrl) => createGrpcTransport({ baseUrl }),
};

const { protocol, base, definition, calls } = JSON.parse(process.argv[2]);
const client = clientOf(definition, transports[protocol](base));
for (const { options, ...call } of calls) {
  const [[method, request]] = Object.entries(call);
  const told = method === "generate" ? await follow(client, request, options) : await once(client, method, request, options);
  console.log(JSON.stringify(told));
}
process.exit(0); // sessions of HTTP/2 would keep it waiting
