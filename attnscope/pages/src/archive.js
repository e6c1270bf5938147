// The archive of arrays (.npz) of a saved record, read in the browser: zip, and NumPy's own format.
import { inflate } from "./data.js";

/** The record cannot be read: why, in a line. */
export class Unreadable extends Error {}

/** The members of a zip archive: by name a function that gives its bytes. */
export function membersOf(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const end = bytes.length - 22; // Python writes no comment behind the list of members
  const [count, start] = [view.getUint16(end + 10, true), view.getUint32(end + 16, true)];
  if (count === 0xffff || start === 0xffffffff) throw new Unreadable("the record is larger than a page reads (4 GB)");
  const members = new Map();
  let at = start;
  for (let number = 0; number < count; number++) {
    const [method, n, extra, comment] = [10, 28, 30, 32].map((offset) => view.getUint16(at + offset, true));
    const [packed, local] = [20, 42].map((offset) => view.getUint32(at + offset, true));
    const name = new TextDecoder().decode(bytes.subarray(at + 46, at + 46 + n)).replace(/\.npy$/, "");
    members.set(name, async () => {
      const from = local + 30 + view.getUint16(local + 26, true) + view.getUint16(local + 28, true);
      const content = bytes.subarray(from, from + packed);
      return method ? inflate(content, "deflate-raw") : content;
    });
    at += 46 + n + extra + comment;
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
  f8: (buffer) => new Float64Array(buffer),
  f4: (buffer) => new Float32Array(buffer),
  f2: (buffer) => Float32Array.from(new Uint16Array(buffer), HALF),
  i8: (buffer) => wide(new BigInt64Array(buffer)),
  i4: (buffer) => new Int32Array(buffer),
  i2: (buffer) => new Int16Array(buffer),
  i1: (buffer) => new Int8Array(buffer),
  u8: (buffer) => wide(new BigUint64Array(buffer)),
  u4: (buffer) => new Uint32Array(buffer),
  u2: (buffer) => new Uint16Array(buffer),
  u1: (buffer) => new Uint8Array(buffer),
  b1: (buffer) => new Uint8Array(buffer),
};

/** An array of NumPy's: its shape, and its values in C's order. */
export function arrayOfNpy(bytes, name) {
  const long = bytes[6] > 1;
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const start = long ? 12 : 10;
  const end = start + (long ? view.getUint32(8, true) : view.getUint16(8, true));
  const header = new TextDecoder("latin1").decode(bytes.subarray(start, end));
  const [, descr] = /'descr':\s*'([^']*)'/.exec(header) || [];
  const [, sizes] = /'shape':\s*\(([^)]*)\)/.exec(header) || [];
  const read = TYPES[descr?.replace(/^[<|=]/, "")];
  if (!read || /'fortran_order':\s*True/.test(header)) throw new Unreadable(`${name} in it is of type ${descr}, which this page cannot read`);
  const shape = sizes.split(",").filter((size) => size.trim()).map(Number);
  return { shape, data: read(bytes.slice(end).buffer) };
}

/** JSON as Python writes it: NaN and infinities become null. */
export function jsonOf(text) {
  try {
    return JSON.parse(text);
  } catch {
    return JSON.parse(text.replace(/"(?:[^"\\]|\\.)*"|-?Infinity|NaN/g, (part) => (part[0] === '"' ? part : "null")));
  }
}
