// Reading of safetensors files, and of the page's blocks that contain them.

const ARRAYS = {
  F64: Float64Array, F32: Float32Array, I32: Int32Array, U16: Uint16Array, I16: Int16Array, U8: Uint8Array,
};

/** Return the flat tensors of a file by name, and the parsed `facts` of its metadata. */
export function readTensors(buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const {__metadata__: metadata = {}, ...entries} = header;
  const tensors = {};
  for (const [name, {dtype, data_offsets: [start, end]}] of Object.entries(entries)) {
    const Kind = ARRAYS[dtype];
    tensors[name] = new Kind(buffer.slice(8 + length + start, 8 + length + end));
  }
  return {tensors, facts: metadata.facts === undefined ? null : JSON.parse(metadata.facts)};
}

/** Read the block of the page with this id: base64 of a deflated file. */
export async function readBlock(id) {
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent), (character) => character.charCodeAt(0));
  const inflated = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return readTensors(await new Response(inflated).arrayBuffer());
}
