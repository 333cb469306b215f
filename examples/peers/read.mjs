// Read a stream over tcp:, and write it as an Arrow IPC stream. Node alone, which cannot receive descriptors.
//
//     node read.mjs "tcp://127.0.0.1:4711?want_data=..." TICKET > stream.arrows
import { connect } from "node:net";

const [uri, ticket] = process.argv.slice(2);
const location = new URL(uri);
const preamble = Buffer.from("DISSOC\0\x01");
let next = 0; // the message to write next. Numbers are modulo 2^32
let [received, greeted, count] = [Buffer.alloc(0), false, undefined];
const [headers, bodies] = [new Map(), new Map([[next, Buffer.alloc(0)]])]; // the schema comes first, and has no body

const padding = (data) => Buffer.alloc(-data.length & 7);

// Return the bodyLength of a Message, the fourth field of its flatbuffer, which is left out if it is 0.
function bodyLength(header) {
  const table = header.readUInt32LE(0), fields = table - header.readInt32LE(table);
  const at = header.readUInt16LE(fields) > 10 ? header.readUInt16LE(fields + 10) : 0;
  return at ? Number(header.readBigInt64LE(table + at)) : 0;
}

// Store a message by the kind of its frame: 1 UNTAGGED, 2 TAGGED, 4 ABORT, 5 RUN.
function take(kind, tag, payload) {
  if (kind === 1 && payload[0] === 1) headers.set(payload.readUInt32LE(1), payload.subarray(5));
  else if (kind === 1 && payload.length === 5 && payload[0] === 0) count = payload.readUInt32LE(1);
  else if (kind === 2 && tag >> 32n === 0n) bodies.set(Number(tag & 0xffffffffn), payload);
  else if (kind === 5) {
    const [n, u, t] = [0, 8, 16].map((at) => Number(payload.readBigUInt64LE(at)));
    const untagged = 24 + 8 * n, tagged = untagged + ((n * u + 7) & ~7);
    for (let i = 0; i < n; i++) {
      take(1, 0n, payload.subarray(untagged + i * u, untagged + (i + 1) * u));
      take(2, payload.readBigUInt64LE(24 + 8 * i), payload.subarray(tagged + i * t, tagged + (i + 1) * t));
    }
  } else throw new Error(kind === 4 ? payload.toString().split("\0")[0] : `a frame of kind ${kind}, tag ${tag}`);
}

const socket = connect(Number(location.port), location.hostname.replace(/[[\]]/g, ""));
const identifier = Buffer.from(ticket), head = Buffer.alloc(16);
head.writeUIntLE(identifier.length, 0, 6);
head[7] = 2;
head.writeBigUInt64LE(BigInt(location.searchParams.get("want_data")), 8); // it may exceed the integers of a number
socket.write(Buffer.concat([preamble, head, identifier, padding(identifier)]));
for await (const chunk of socket) {
  received = Buffer.concat([received, chunk]);
  if (!greeted && received.length >= 8) {
    if (!received.subarray(0, 8).equals(preamble)) throw new Error("this is another protocol");
    [greeted, received] = [true, received.subarray(8)];
  }
  while (greeted && received.length >= 16) {
    const length = received.readUIntLE(0, 6), end = 16 + length + (-length & 7);
    if (received.length < end) break;
    take(received[7], received.readBigUInt64LE(8), received.subarray(16, 16 + length));
    received = received.subarray(end);
  }
  for (; headers.has(next) && bodies.has(next); next = next + 1 >>> 0) {
    const header = headers.get(next), body = bodies.get(next), prefix = Buffer.alloc(8, 0xff);
    headers.delete(next), bodies.delete(next);
    if (body.length !== bodyLength(header)) throw new Error(`body-length: ${body.length} bytes of message ${next}`);
    prefix.writeUInt32LE(header.length + padding(header).length, 4);
    process.stdout.write(Buffer.concat([prefix, header, padding(header), body]));
  }
  if (next === count) break;
}
if (next !== count) throw new Error(`stream-whole: message ${next} is missing`);
process.stdout.write(Buffer.from("ffffffff00000000", "hex"));
