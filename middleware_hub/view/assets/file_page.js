// The page of a samples file: the list of samples, and the open one.

import {entitle, putInto, several} from "./elements.js";
import {Pieces} from "./pieces.js";
import {SampleList} from "./sample_list.js";
import {SampleView} from "./sample_view.js";
import {Sheet} from "./sheet.js";
import {readBlock} from "./tensors.js";

async function open() {
  const {facts: index} = await readBlock("index");
  const pieces = new Pieces(index.spelled ? (await readBlock("vocabulary")).tensors : null);
  entitle(`${index.file} – tokens`);
  const about = document.getElementById("about");
  putInto(about, `${index.file}: ${several(index.samples.length, "sample")}`);
  if (!index.samples.length) {
    const why = index.why_empty === null ? "" : ` (${index.why_empty})`;
    putInto(about, `${index.file} has no samples${why}.`);
    return;
  }
  const trees = new Map(index.trees.map((tree) => [tree.session_id, tree]));
  let wanted = 0;
  const choose = async (place, turn = null) => {
    wanted = place;
    const sheet = new Sheet(await readBlock(`sample-${place}`));
    if (wanted !== place) return; // the user has chosen another sample meanwhile
    const tree = trees.get(index.samples[place].session_id) ?? null;
    view.show(sheet, pieces, {tree, sample: place, turn});
    list.mark(place);
    document.getElementById("page").dataset.shown = String(place);
  };
  const guarded = (place, turn) => choose(place, turn).catch(failed);
  const view = new SampleView(guarded), list = new SampleList(index.samples, guarded);
  if (index.samples.length > 1) document.getElementById("samples").append(list.element);
  document.getElementById("view").append(view.element);
  await choose(0);
}

function failed(error) {
  const problem = document.getElementById("problem");
  putInto(problem, `This page cannot be shown: ${error.message}`);
  problem.hidden = false;
}

open().catch(failed);
