// A saved record that the page holds as the bytes of its npz: read and shown as the page's own content.
import { Catalog, catalogs } from "./catalog.js";
import { manifest, unpackBlock } from "./data.js";
import { readRecord } from "./reading.js";
import { savedHooks } from "./state.js";

savedHooks.open = async () => {
  const { name, block } = manifest.saved;
  const { texts, roles, record } = await readRecord(name, await unpackBlock(block));
  Object.assign(manifest, { texts, roles, atlas: record && { heads: null, grid: record.grid } });
  catalogs.current = record && new Catalog(record);
};
