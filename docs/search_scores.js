// Guides come before the reference and the evidence, which name every word.
const LATER = /^(api\/.*|commands|design|glossary|performance|results|sharp_edges)$/;
// Where scores are equal, these come first.
const FIRST = { choosing: 1, images: 1, training: 1, use: 1, scale: 2 };
var Scorer = {
  score: ([page, title, anchor, description, score]) =>
    LATER.test(page) ? score - 20 : score + (FIRST[page] ?? 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
