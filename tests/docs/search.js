// What the site's search finds, best first: lunr over its index, with the weights of the theme. Arguments: lunr.js, the
// index, words. Writes a list of addresses for each word, as JSON.
const fs = require("fs");
const [lunr, path, ...words] = process.argv.slice(2);
const { docs } = JSON.parse(fs.readFileSync(path));
const index = require(lunr)(function () {
  this.ref("location");
  this.field("title", { boost: 1000 });
  this.field("text");
  for (const each of docs) {
    this.add({ ...each, text: each.text.replace(/<[^>]+>/g, " ") }, { boost: each.boost || 1 });
  }
});
console.log(JSON.stringify(words.map((word) => index.search(word).map((found) => found.ref))));
