// Archives of arrays (.npz) read in the browser: zip, and NumPy's own format. What is damaged is said in a line.
import { inflate } from "./data.js";

/** A file cannot be read: why, in a line. */
export class Unreadable extends Error {}

const CRC = Uint32Array.from({ length: 256 }, (_, at) => {
  let value = at;
  for (let bit = 0; bit < 8; bit++) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1;
  return value;
});

function checksum(bytes) {
  let value = ~0;
  for (let at = 0; at < bytes.length; at++) value = CRC[(value ^ bytes[at]) & 255] ^ (value >>> 8);
  return ~value >>> 0;
}

const MOST_BYTES = 1 << 30; // of one member: more would be beyond what a browser holds

/** The members of a zip archive: by name a function that gives its bytes, whole and checked, or refuses. */
export function membersOf(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  let end = bytes.length - 22;
  while (end >= 0 && end > bytes.length - 65558 && view.getUint32(end, true) !== 0x06054b50) end--;
  if (end < 0 || view.getUint32(end, true) !== 0x06054b50) throw new Unreadable("the archive is cut off, or is none");
  const [count, start] = [view.getUint16(end + 10, true), view.getUint32(end + 16, true)];
  if (count === 0xffff || start === 0xffffffff) throw new Unreadable("the archive is larger than this page reads (4 GB)");
  const members = new Map();
  let at = start;
  try {
    for (let number = 0; number < count; number++) {
      if (view.getUint32(at, true) !== 0x02014b50) throw new Unreadable("the archive is damaged: its list of members cannot be read");
      const [method, n, extra, comment] = [10, 28, 30, 32].map((offset) => view.getUint16(at + offset, true));
      const [crc, packed, size, local] = [16, 20, 24, 42].map((offset) => view.getUint32(at + offset, true));
      const name = new TextDecoder().decode(bytes.subarray(at + 46, at + 46 + n)).replace(/\.npy$/, "");
      members.set(name, async () => {
        if (size > MOST_BYTES) throw new Unreadable(`${name} in it is too large for a browser`);
        const from = local + 30 + view.getUint16(local + 26, true) + view.getUint16(local + 28, true);
        const content = bytes.subarray(from, from + packed);
        if (method !== 0 && method !== 8) throw new Unreadable(`${name} in it is packed in a way that this page cannot read`);
        const whole = method ? await inflate(content, "deflate-raw").catch(() => []) : content;
        if (whole.length !== size || checksum(whole) !== crc) throw new Unreadable(`${name} in it is damaged`);
        return whole;
      });
      at += 46 + n + extra + comment;
    }
  } catch (error) {
    if (error instanceof RangeError) throw new Unreadable("the archive is cut off");
    throw error;
  }
  return members;
}

const wide = (bytes) => Float64Array.from(bytes, Number);
const HALF = (code) => {
  const [sign, power, rest] = [code >> 15 ? -1 : 1, (code >> 10) & 31, code & 1023];
  if (power === 31) return rest ? NaN : sign * Infinity;
  return sign * (power ? 2 ** (power - 15) * (1 + rest / 1024) : 2 ** -14 * (rest / 1024));
};
const TYPES = {
  f8: [8, (buffer) => new Float64Array(buffer)],
  f4: [4, (buffer) => new Float32Array(buffer)],
  f2: [2, (buffer) => Float32Array.from(new Uint16Array(buffer), HALF)],
  i8: [8, (buffer) => wide(new BigInt64Array(buffer))],
  i4: [4, (buffer) => new Int32Array(buffer)],
  i2: [2, (buffer) => new Int16Array(buffer)],
  i1: [1, (buffer) => new Int8Array(buffer)],
  u8: [8, (buffer) => wide(new BigUint64Array(buffer))],
  u4: [4, (buffer) => new Uint32Array(buffer)],
  u2: [2, (buffer) => new Uint16Array(buffer)],
  u1: [1, (buffer) => new Uint8Array(buffer)],
  b1: [1, (buffer) => new Uint8Array(buffer)],
};

/** An array of NumPy's: its shape, and its values in C's order; of texts as strings. */
export function arrayOfNpy(bytes, name) {
  const damaged = () => new Unreadable(`${name} in it is damaged`);
  if (bytes.length < 12 || String.fromCharCode(...bytes.subarray(1, 6)) !== "NUMPY") throw damaged();
  const long = bytes[6] > 1;
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const start = long ? 12 : 10;
  const end = start + (long ? view.getUint32(8, true) : view.getUint16(8, true));
  const header = new TextDecoder("latin1").decode(bytes.subarray(start, end));
  const [, descr] = /'descr':\s*'([^']*)'/.exec(header) || [];
  const [, sizes] = /'shape':\s*\(([^)]*)\)/.exec(header) || [];
  if (!descr || sizes === undefined) throw new Unreadable(`${name} in it holds no numbers or texts`);
  if (/'fortran_order':\s*True/.test(header)) throw new Unreadable(`${name} in it is stored column by column; save a copy of it`);
  const shape = sizes.split(",").filter((size) => size.trim()).map(Number);
  const count = shape.reduce((product, size) => product * size, 1);
  const [, kind, letters] = /^[<|=]([US])(\d+)$/.exec(descr) || [];
  const [item, read] = kind ? [(kind === "U" ? 4 : 1) * Number(letters)] : TYPES[descr.replace(/^[<|=]/, "")] || [];
  if (!item && !kind) throw new Unreadable(`${name} in it is of type ${descr}, which this page cannot read`);
  if (bytes.length - end !== count * item) throw damaged();
  const buffer = bytes.slice(end).buffer;
  if (!kind) return { shape, data: read(buffer) };
  const codes = kind === "U" ? new Uint32Array(buffer) : new Uint8Array(buffer);
  const each = Number(letters);
  const data = Array.from({ length: count }, (_, at) => {
    let text = "";
    for (const code of codes.subarray(at * each, (at + 1) * each)) if (code) text += String.fromCodePoint(code);
    return text;
  });
  return { shape, data };
}

/** JSON as Python writes it: NaN and infinities become null. */
export function jsonOf(text) {
  try {
    return JSON.parse(text);
  } catch {
    return JSON.parse(text.replace(/"(?:[^"\\]|\\.)*"|-?Infinity|NaN/g, (part) => (part[0] === '"' ? part : "null")));
  }
}
